"""RunnerConfig: what the runner reads of the engine's options."""

from dataclasses import dataclass

from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.modes import Pooling
from paceline.layers.sampling import LogitsProcessor
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import (
    AHEAD,
    CapturePolicy,
)
from paceline.runner.staging import RING_DEPTH, STEPS_IN_FLIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """What the runner reads of the engine's options."""

    max_running: int  # requests of a step
    max_batched_tokens: int  # tokens of a step
    context_len: int  # tokens of a request, prompt and output
    max_join_tokens: int  # known tokens of the requests that join in one step
    num_pages: tuple[int, ...]  # [num_groups] pages of each pool, the reserved one included
    graph_max_reqs: int  # of a decode step that is padded and runs as a graph
    graph_max_tokens: int = 0  # of a prefill or mixed step that is; 0: none
    latent_expand_from: int = 0  # prompt tokens of a request in a step that is no graph, from which
    # latents are expanded; 0: never
    sizes: GraphSizes | None = None  # padded sizes; None: the usual ones up to these two
    capture: bool = True  # False: every step eager, padded all the same
    capture_policy: CapturePolicy = AHEAD
    recorded_bytes: int | None = None  # intermediates of recorded graphs at most; None: any number
    poison_graphs: bool = False
    share_prefixes: bool = True  # a decode may read what requests share once for several of them
    sanitize: bool = False  # run every step twice, over poison
    staging_depth: int = RING_DEPTH
    max_tree_rows: int = 0  # of a request in a step whose rows form trees; 0: no such steps
    overlay_slots: int = 0  # input rows in place of embeddings that requests hold at once
    has_blocks: bool = False  # prompts may have blocks, whose tokens see one another
    draft: DraftShape = NO_DRAFTS  # of a proposer's rounds
    max_drafting: int | None = None  # requests of a round that is served; None: all
    force_accept_len: float | None = None  # tokens per round, whatever was sampled
    rejects: bool = False  # accept drafts by rejection sampling
    logits_processors: tuple[LogitsProcessor, ...] = ()  # behind the built-in ones
    pooling: Pooling | None = None  # of requests that end in a vector; None: none may

    @property
    def max_tokens(self) -> int:
        """Tokens of a step, of a round's rows too."""
        return max(self.max_batched_tokens, self.max_running * self.draft.num_draft_tokens)

    @property
    def draft_tokens(self) -> int:
        """Tokens of a draft pass: of a step it observes, or of a tree's last pass."""
        return max(self.max_tokens, self.padded_reqs * self.draft.reach)

    def graph_sizes(self, every: int = 4) -> GraphSizes:
        """Padded sizes of steps that may be graphs.  every: as of `GraphSizes.up_to`.

        What is left over is in rows of their own, which must stay within the context.
        """
        if self.sizes is not None:
            return self.sizes
        most = min(self.graph_max_reqs, self.max_running)
        tokens = min(self.graph_max_tokens, self.max_tokens, most * self.context_len)
        pad_len = self.context_len if tokens > self.context_len else 0
        return GraphSizes.up_to(most, every=every, max_tokens=tokens, pad_len=pad_len)

    @property
    def padded_reqs(self) -> int:
        """Requests of a step; what a padded ragged one leaves over is in rows of its own."""
        return self.max_running + self.graph_sizes().spare_rows

    @property
    def tree_rows(self) -> int:
        """Rows of a request's tree at most; 0: no trees."""
        return max(self.max_tree_rows, 0 if self.draft.is_chain else self.draft.num_draft_tokens)

    @property
    def kv_len_bound(self) -> int:
        """Tokens of a page-table row: the context limit and what can be in flight behind it."""
        return self.context_len + tokens_in_flight(self.draft)


def tokens_in_flight(draft: DraftShape) -> int:
    """What may be written behind the context limit: rope tables and page-table rows cover it."""
    return STEPS_IN_FLIGHT + draft.reach
