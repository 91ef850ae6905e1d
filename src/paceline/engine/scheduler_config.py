"""SchedulerConfig: the limits of a step, checked when they are made."""

from dataclasses import dataclass

from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.errors import ConfigError
from paceline.core.events import Event
from paceline.core.modes import Pooling
from paceline.engine.request import HostNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may put into one step."""

    max_running: int  # requests: rows 1..max_running of the request table
    max_batched_tokens: int  # tokens of one step, decode rows included; a round always holds all
    chunked_prefill_size: int  # prompt tokens of one request in one step
    max_join_tokens: int  # known tokens of the requests that join in one step; one may exceed it
    padded_tokens: tuple[int, ...] = ()  # sizes of steps with prompts, ascending; (): not padded
    reserve_ahead: int = 256  # tokens a request grows by while the pool is roomy
    admission_margin: int = 32  # tokens of room behind a prompt that admission asks for
    mix_prefill_and_decode: bool = True  # False: steps alternate between the two; so with a drafter
    draft: DraftShape = NO_DRAFTS  # of every round
    max_drafting: int | None = None  # requests of a round; while more decode: plain.  None: all
    host_needs: frozenset[HostNeed] = frozenset()  # of every request
    whole_prompts: bool = False  # a step computes all of a prompt, or none of it
    pooling: Pooling | None = None  # of requests that end in a vector; None: none may

    @property
    def is_mixed(self) -> bool:
        """Whether a step holds prompts and decodes."""
        return self.mix_prefill_and_decode and not self.draft.has_drafts

    @property
    def max_masks(self) -> int:
        """Masks of a step: of each request one, and of one the drafts too."""
        return self.max_running + self.draft.num_draft_tokens - 1

    def mask_share(self, num_forms: int) -> int:
        """Drafts of each of so many requests with a grammar that a step has masks for; at least 1:
        others may have none."""
        return max(1, (self.max_masks - num_forms) // max(1, num_forms))

    def kv_limit(self, max_len: int) -> int:
        """Tokens that a request of `max_len` tokens ever has pages for."""
        return max_len - 1 + self.draft.reach

    @property
    def max_block(self) -> int:
        """Tokens of a block at most: a step must hold it, whoever decodes beside."""
        beside = self.max_running - 1 if self.is_mixed else 0
        return min(self.chunked_prefill_size, self.max_batched_tokens - beside)

    @property
    def fallback(self) -> Event | None:
        """What an engine of these limits does other than usual; for its report."""
        if not (self.draft.has_drafts and HostNeed.EXACT_LENGTHS in self.host_needs):
            return None
        return Event(
            HostNeed.EXACT_LENGTHS.value,
            "the attention backend plans on the host, from exact lengths: the next round of a "
            "request waits for the outputs of the one before",
        )

    def __post_init__(self) -> None:
        least = {
            "max_running": 1,
            "chunked_prefill_size": 1,
            "max_join_tokens": 1,
            "max_batched_tokens": max(self.max_running, 1),
            "reserve_ahead": 0,
            "admission_margin": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError.about(
                    name,
                    expected=f"at least {low}",
                    got=getattr(self, name),
                    remedy="a step must hold one token of every running request"
                    if name == "max_batched_tokens"
                    else "raise it",
                )
