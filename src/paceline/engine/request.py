"""Request: one generation as the scheduler follows it, in token counts.

Lengths are known late, since outputs arrive one turn late: what retired steps have shown, and
what holds once every launched step has run, if the row still runs then.  A round of speculation
emits 1 to max_path tokens, so that is known from both sides only; of all else the two are equal.

    token_ids   [0 ....... prompt_len ....... num_known)            received by the host
    KV          [0 ... kv_known)              by retired steps
                [0 ........ kv_least)         at least, once launched steps ran
                [0 .............. kv_bound)   at most
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum

from paceline.cache.page_keys import NO_KEYS, PageKeys
from paceline.core.errors import message
from paceline.core.modes import End
from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.seeds import child_seed
from paceline.core.step import PromptPositions
from paceline.engine.acceptance import Acceptance
from paceline.engine.ends import PooledRows
from paceline.engine.grammar import Constraint


class RequestState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # holds no row and no pages
    RUNNING = "running"  # holds a row and pages
    DRAINING = "draining"  # preempted; holds its row until its in-flight outputs have arrived
    FINISHED = "finished"  # holds at most its row, until its in-flight outputs have arrived


class FinishReason(StrEnum):
    """Why a request ended; the value is what users see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class HostNeed(StrEnum):
    """What the host must know of a request before the next step that feeds on its token: such a
    request waits for its outputs, while others go on.  The value is the reason that users see.
    """

    EXACT_LENGTHS = "host_plan_sync"  # its length: a backend plans on the host
    GRAMMAR = "grammar"  # its last token: which may follow depends on it
    HOST_DRAFTS = "host_drafts"  # its last token: what is drafted depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How a request takes turns with others that wait (waiting.py)."""

    client: str = ""  # whose requests take turns with those of other clients
    weight: float = 1.0  # tokens of the client for each of one with weight 1
    priority: int = 0  # among its client's: lower goes first


ALIKE = Share()


@dataclass(slots=True, eq=False)
class Request:
    """One generation.  The scheduler, with its roster and its RoundPolicy, alone writes
    its fields."""

    request_id: str
    params: SamplingParams
    token_ids: list[int]  # [num_known] prompt, then received output
    prompt_ids: tuple[int, ...]  # [prompt_len] for who only reads
    prompt_len: int
    max_len: int  # finished once this many tokens are known, prompt included
    packed_ids: bytes | None = None  # [prompt_len] int32 of its prompt, where who asks has it
    keys: PageKeys = NO_KEYS  # what its KV depends on beside its tokens
    positions: PromptPositions | None = None  # where rope has several axes; None: the index
    share: Share = ALIKE
    parent_id: str = ""  # what the caller asked as
    index: int = 0  # of the caller's completions
    input_rows: tuple[InputRows, ...] = ()  # of its prompt, ascending
    encoder: EncoderInput | None = None  # what layers read that read an encoder's rows
    second_from: int | None = None  # where a pair's second text begins, if its type is another
    end: End = End.GENERATE
    pooled: PooledRows | None = None  # its vector, where that is its end
    leader: "Request | None" = None  # the first completion, which computes the prompt for all
    constraint: Constraint | None = None  # by a grammar, which must know its drafts
    host_needs: frozenset[HostNeed] = frozenset()
    arrival: int = 0  # order of arrival
    state: RequestState = RequestState.WAITING
    row: int | None = None  # request-table row
    join_len: int = 0  # tokens known when it (re)joined: computed by prefill
    kv_known: int = 0
    in_flight: int = 0  # launched steps that contain it, outputs not yet processed
    least_in_flight: int = 0  # tokens these add to the KV, at least
    most_in_flight: int = 0  # and at most
    last_epoch: int = 0  # of the last launched step that contains it
    given_epoch: int = 0  # of the last that gave it drafts of its constraint
    num_scored: int = 0  # prompt tokens behind the first that need no log-probability any more
    score_from: int = 0  # of these, when it (re)joined
    num_cached: int = 0  # tokens of the first admission found in the cache
    num_joins: int = 0
    num_preemptions: int = 0
    is_followed: bool = True  # by the drafter, since it (re)joined
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish: FinishReason | None = None
    error: str | None = None
    tier: SamplerTier = field(init=False)  # of its parameters

    def __post_init__(self) -> None:
        self.tier = self.params.sampler_tier

    @classmethod
    def make(
        cls,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        context_len: int,
        packed_ids: bytes | None = None,
        keys: PageKeys = NO_KEYS,
        input_rows: tuple[InputRows, ...] = (),
        constraint: Constraint | None = None,
        positions: PromptPositions | None = None,
        encoder: EncoderInput | None = None,
        share: Share = ALIKE,
        end: End = End.GENERATE,
        score_from: int = 1,
        second_from: int | None = None,
    ) -> "Request":
        """A waiting request; `Admission` has seen that its prompt fits the context.

        score_from: the first prompt token whose log-probability is wanted, where any is.
        Keys are turned by their positions, and are made of what an encoder saw, so it shares pages
        with requests of the same alone.
        """
        if constraint is not None:  # it has the grammar
            params = replace(params, structured_outputs=None)
        num_prompt = len(prompt_ids)
        if positions is not None:
            keys = replace(keys, salt=(keys.salt, positions))
            context_len -= max(positions.delta, 0)
        if encoder is not None:
            keys = replace(keys, salt=(keys.salt, encoder.media_hash))
        if end is not End.GENERATE:  # its prompt alone, behind which nothing is known
            context_len = num_prompt + 1
        assert 0 < num_prompt < context_len, (request_id, num_prompt, context_len)
        wanted = context_len if params.max_tokens is None else num_prompt + params.max_tokens
        return cls(
            request_id=request_id,
            params=params,
            token_ids=list(prompt_ids),
            prompt_ids=tuple(prompt_ids),
            packed_ids=packed_ids,
            prompt_len=num_prompt,
            max_len=min(wanted, context_len),
            keys=keys,
            input_rows=input_rows,
            positions=positions,
            share=share,
            parent_id=request_id,
            constraint=constraint,
            encoder=encoder,
            end=end,
            num_scored=score_from - 1,
            second_from=second_from,
        )

    def sibling(self, index: int) -> "Request":
        """Another completion of the same prompt, by a seed of its own."""
        seed = self.params.seed
        assert seed is not None, "a request that has siblings has a seed"
        params = replace(self.params, seed=child_seed(seed, index), prompt_logprobs=None)
        return Request(
            request_id=f"{self.request_id}#{index}",
            params=params,
            token_ids=list(self.token_ids),
            prompt_ids=self.prompt_ids,
            packed_ids=self.packed_ids,
            prompt_len=self.prompt_len,
            max_len=self.max_len,
            keys=self.keys,
            input_rows=self.input_rows,
            positions=self.positions,
            encoder=self.encoder,
            share=self.share,
            parent_id=self.request_id,
            index=index,
            leader=self,
            constraint=None if self.constraint is None else self.constraint.fork(),
            end=self.end,
        )

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def has_prompt_kv(self) -> bool:
        """Whether a retired step has completed the KV of its prompt, or it has ended."""
        return self.num_known > self.prompt_len or self.state is RequestState.FINISHED

    @property
    def num_input_rows(self) -> int:
        """Tokens whose row it brings."""
        return sum(source.num_tokens for source in self.input_rows)

    @property
    def encoder_len(self) -> int:
        """Rows of its encoder."""
        return 0 if self.encoder is None else self.encoder.num_rows

    @property
    def num_to_score(self) -> int:
        """Prompt tokens whose log-probabilities are wanted: all but the first."""
        return 0 if self.params.prompt_logprobs is None else self.prompt_len - 1

    @property
    def max_hit(self) -> int | None:
        """Tokens it may take from the cache: those before the first to score, none where a vector
        is made of all.  None: any."""
        if self.pooled is not None and self.pooled.pooling.needs_all:
            return 0
        return None if self.num_scored >= self.num_to_score else self.num_scored

    @property
    def kv_least(self) -> int:
        """Tokens whose KV is in the cache once launched steps ran, at least."""
        return self.kv_known + self.least_in_flight

    @property
    def kv_bound(self) -> int:
        """The same at most, of a row that still runs: it knows one token more, and lacks one."""
        most, last = self.kv_known + self.most_in_flight, self.max_len - 2
        return most if most < last else last  # `min` costs more: asked for every row

    @property
    def is_exact(self) -> bool:
        """Whether that length is known, as it is unless a round is in flight."""
        return self.least_in_flight == self.most_in_flight

    @property
    def is_prefilling(self) -> bool:
        """Whether the next step computes known tokens; otherwise it feeds on the device's own."""
        return self.kv_known + self.least_in_flight < self.join_len

    @property
    def is_complete(self) -> bool:
        """Whether the launched steps already reach max_len: nothing is left to schedule."""
        kv_least = self.kv_known + self.least_in_flight
        return kv_least >= self.join_len and kv_least + 1 >= self.max_len

    @property
    def can_decode(self) -> bool:
        """Whether the next step feeds on the device's own token: neither prompt nor complete."""
        kv_least = self.kv_known + self.least_in_flight
        return kv_least >= self.join_len and kv_least + 1 < self.max_len

    @property
    def is_done(self) -> bool:
        """Whether its grammar ended it, behind a token that is text."""
        return self.constraint is not None and self.constraint.is_done

    @property
    def missing(self) -> set[str]:
        """What of `host_needs` the host does not know yet: its length is exact unless a round is in
        flight, its last token is known once nothing is.
        """
        known = {HostNeed.EXACT_LENGTHS: self.is_exact}
        return {need.value for need in self.host_needs if not known.get(need, not self.in_flight)}

    def fail(self) -> None:
        """Say why it ends: its logits, or what else is its end, are not finite."""
        made = "logits" if self.end is End.GENERATE else f"{self.end} of the hidden states"
        self.error = message(
            f"{made} of request '{self.request_id}'",
            expected="finite",
            got="NaN or infinity",
            remedy="check the model's weights and dtype",
        )

    def add_note(self, note: str) -> None:
        """Say more of why it has ended."""
        self.error = f"{self.error}; {note}"
