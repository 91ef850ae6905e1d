"""Cases as data: what a cell runs, before anything is computed.  Imports torch nowhere.

A case is a sequence of batches that one runner launches in order, so that a graph captured by the
first ones is replayed with other data, fewer rows and shorter or longer requests.
"""

from dataclasses import dataclass
from enum import Enum

from paceline.core.model.config import Heads, RowPart, kv_parts
from paceline.core.model.lookback import Lookback
from paceline.core.modes import MaskKind
from paceline.core.step import PromptPositions
from paceline.proof.suite.modes import ExtendShape, ForwardMode


class PageLayout(Enum):
    """How a batch's pages lie in the pool."""

    CONTIGUOUS = "contiguous"  # request after request, ascending
    SHUFFLED = "shuffled"  # a permutation that is not the identity for any request of two pages
    INTERLEAVED = "interleaved"  # round robin over the requests
    REVERSED = "reversed"  # descending within each request
    SHARED_PREFIX = "shared_prefix"  # full prefix pages all requests have in common are one copy
    HIGH_IDS = "high_ids"  # shuffled, at the end of a pool twice as large


class Inputs(Enum):
    """What queries, keys and values are filled with."""

    NEEDLE = "needle"  # each query has an exact small set of winners; a wrong key dominates
    RANDOM = "random"  # normal
    UNEVEN = "uneven"  # as NEEDLE, but every other row and head scores many times higher


Spans = tuple[tuple[int, int], ...]  # [start, stop) positions of each, ascending and apart


@dataclass(frozen=True, slots=True)
class Batch:
    """One launch: its requests, without padding."""

    prefix_lens: tuple[int, ...]  # [num_reqs] tokens in the cache before the step
    extend_lens: tuple[int, ...]  # [num_reqs] tokens computed in the step, at least 1
    parents: tuple[tuple[int, ...], ...] | None = None  # [num_reqs][extend_len] row of the same
    # request a node hangs on, -1: the prefix.  None: a chain, or the mode's own mask.
    frozen: tuple[int, ...] = ()  # requests that the device has finished, unknown to the host: the
    # step carries them, and drops what comes of them
    goes_on: bool = False  # in the rows of the batch before, with as many requests
    blocks: tuple[Spans, ...] | None = None  # [num_reqs] within the step's tokens, which see one
    # another there.  None: nobody sees ahead
    encoder_lens: tuple[int, ...] | None = None  # [num_reqs] rows of each request's encoder, which
    # every token sees; 0: it brings none.  None: its tokens see one another
    rope: tuple[PromptPositions | None, ...] | None = None  # [num_reqs] where its tokens stand for
    # a rope of several axes; None: at their index
    accepted: tuple[tuple[int, ...], ...] | None = None  # [num_reqs][num_kept] rows of a round that
    # last, the root first.  None: no round, all rows last

    @property
    def num_reqs(self) -> int:
        return len(self.prefix_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.extend_lens)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """[num_reqs] prefix + extend, always."""
        return tuple(p + e for p, e in zip(self.prefix_lens, self.extend_lens, strict=True))

    @property
    def key_lens(self) -> tuple[int, ...]:
        """[num_reqs] rows that the caches of its layers hold of it."""
        return self.kv_lens if self.encoder_lens is None else self.encoder_lens

    @property
    def committed(self) -> tuple[int, ...]:
        """[num_reqs] tokens behind the step: the prefix and the rows that last."""
        if self.accepted is None:
            return self.kv_lens
        pairs = zip(self.prefix_lens, self.accepted, strict=True)
        return tuple(prefix + len(rows) for prefix, rows in pairs)

    @property
    def is_dropped(self) -> tuple[bool, ...]:
        """[num_tokens] whether nobody reads a token's output: its request is frozen."""
        return tuple(
            request in self.frozen
            for request, extend in enumerate(self.extend_lens)
            for _ in range(extend)
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """What one attention layer adds to the case's heads."""

    window: Lookback | None = None  # keys visible; None = all


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell's work, whatever the backend and runner.

    Names are unique among the cases of a method and mode; with backend and runner they are a cell.
    """

    name: str  # the variant
    method: str  # "dense"; "swa" when a layer has a window, "chunk" when it has chunks; "mla" where
    # V is in K; "cross" where an encoder's rows are read; "embed" where layers look both ways; of
    # layers that keep states, the kind of mixer
    mode: ForwardMode
    batches: tuple[Batch, ...]  # at least one
    captured_reqs: int  # rows every step of the case is padded to; 0: no padding
    captured_tokens: int = 0  # of a ragged mode: tokens it is padded to
    page_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    v_in_k: bool = False  # V is the leading v_head_dim columns of K: absorbed latent attention
    latent_expand_from: int = 0  # tokens of a request from which its latents are expanded, in a
    # step that is no graph; 0: never
    ragged_backend: str = "own"  # who attends to what is expanded; on a CPU a library's emulator
    dtype: str = "float32"  # of queries, keys and values
    kv_dtype: str | None = None  # of the cache: "float8_e4m3fn", or None for dtype
    layers: tuple[Layer, ...] = (Layer(),)
    soft_cap: float | None = None
    sinks: bool = False
    layout: PageLayout = PageLayout.SHUFFLED
    inputs: Inputs = Inputs.NEEDLE
    prefix_only: bool = False  # Part.PREFIX: the prefix alone, non-causal, nothing is written
    step_only: bool = False  # Part.STEP: the step's own rows alone, nothing is written or read
    both_ways: bool = False  # its layers see the whole of each request, and windows ahead as far as
    # back: they cache nothing, and no request has a prefix
    rope_axes: int = 1  # numbers that say where a token stands
    state_every: int | None = None  # tokens between states that are kept: its layers keep a state
    # of each request, and no rows.  None: its layers attend
    is_quick: bool = True  # in `paceline check --quick`
    is_interpreted: bool = False  # small enough for Triton's interpreter on a CPU
    seed: int = 0

    def mask(self, batch: Batch) -> MaskKind:
        """Which keys of the step a query sees."""
        kind = self.mode.facts.mask
        if batch.blocks is not None:
            return MaskKind.BLOCK
        if kind is MaskKind.TREE and batch.parents is None:
            return MaskKind.CAUSAL  # a chain
        return kind

    @property
    def is_part(self) -> bool:
        """Whether its layers attend to a part of the keys: no sink counts, nothing is written."""
        return self.prefix_only or self.step_only

    @property
    def has_crowd(self) -> bool:
        """Whether its steps say that many requests share a prefix."""
        return self.layout is PageLayout.SHARED_PREFIX and self.mode is ForwardMode.DECODE

    @property
    def has_scaled_latents(self) -> bool:
        """Whether rows of latents are codes, each with a scale of its own."""
        return self.v_in_k and self.kv_dtype is not None

    @property
    def heads(self) -> Heads:
        """Of each layer."""
        dims = self.head_dim, self.v_head_dim
        return Heads(self.num_heads, self.num_kv_heads, *dims, self.v_in_k)

    @property
    def parts(self) -> tuple[RowPart, ...]:
        """What a token brings of each layer that attends: what is cached, but for codes."""
        dims = self.head_dim, self.v_head_dim
        return kv_parts(self.num_kv_heads, *dims, v_in_k=self.v_in_k)

    @property
    def reads_encoder(self) -> bool:
        """Whether its layers attend to the rows of an encoder, in every batch."""
        return self.batches[0].encoder_lens is not None

    @property
    def brought(self) -> tuple[str, ...]:
        """The parts of which a token of a step brings a row."""
        return () if self.reads_encoder else tuple(p.name for p in self.parts if p.of is None)

    @property
    def is_ragged(self) -> bool:
        """Whether requests bring each their own number of tokens."""
        return self.mode.facts.extend is ExtendShape.RAGGED

    @property
    def max_extend_len(self) -> int:
        """Tokens that a request brings in one step, at most."""
        return max(max(batch.extend_lens) for batch in self.batches)

    @property
    def max_kv_len(self) -> int:
        """The longest request of any batch, in tokens."""
        return max(max(batch.kv_lens) for batch in self.batches)
