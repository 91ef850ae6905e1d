"""Step: what the scheduler decided for one turn, as host integers, and what came back.

Everything else (lengths, positions, tables, offsets) is derived from a Step and the request table,
on the device, by `runner.derive`.  Pure Python; imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

from paceline.core.errors import RequestError
from paceline.core.modes import GENERATES, End, MaskKind
from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.request.blocks import Blocks
from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.request.sampling_params import SamplerTier, SamplingParams


class FinishCode(IntEnum):
    """Why the device froze a row.  The device knows ids and limits; the host knows the rest."""

    RUNNING = 0
    STOP_TOKEN = 1  # an end token or a stop id; the token itself is emitted
    LENGTH = 2  # max_tokens or the end of the context
    NON_FINITE = 3  # the row's logits held NaN or inf; no token is emitted


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Where the tokens of a prompt stand for a rope of several axes, if that is not their index.

    Raises RequestError for axes of different lengths and for what is no position.
    """

    axes: tuple[tuple[int, ...], ...]  # [axes][prompt_len]
    delta: int  # behind the prompt a token stands at its index + delta, on every axis

    def __post_init__(self) -> None:
        lengths = [len(axis) for axis in self.axes]
        least = min((min(axis, default=0) for axis in self.axes), default=0)
        if len(set(lengths)) != 1 or lengths[0] + self.delta < 0 or least < 0:
            raise RequestError.about(
                "positions of a prompt",
                expected="axes of one length, and no position below 0, nor behind the prompt",
                got=f"axes of {lengths} tokens, from {least} on, and behind them index "
                f"{self.delta:+d}",
                remedy="give every token of the prompt a position on every axis",
            )

    def require(self, *, axes: int, prompt_len: int, context_len: int) -> None:
        """Raise RequestError unless a model of so many axes can place a prompt so."""
        most = max(max(axis, default=0) for axis in self.axes)
        if (len(self.axes), len(self.axes[0])) != (axes, prompt_len) or most >= context_len:
            raise RequestError.about(
                "positions of a prompt",
                expected=f"[{axes}, {prompt_len}] for the axes of the model's rope and the tokens "
                f"of the prompt, below {context_len}",
                got=f"[{len(self.axes)}, {len(self.axes[0])}], up to {most}",
                remedy="make them from the prompt's tokens for this model; leave them out where "
                "its rope has one axis",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinDelta:
    """A request enters its row (first admission, or resume after preemption)."""

    row: int
    token_ids: tuple[int, ...]  # [num_known] prompt, then what was generated before a preemption
    prompt_len: int  # tokens of token_ids that are prompt; the rest counts as output
    prefix_len: int  # tokens whose KV is already in the cache (a prefix hit), < num_known
    max_len: int  # the row is finished once it knows this many tokens, prompt included
    params: SamplingParams
    positions: PromptPositions | None = None  # None: every token stands at its index
    encoder: EncoderInput | None = None  # written into its pages before the step; None: no rows
    blocks: Blocks | None = None  # whose tokens see one another; None: every token sees back alone
    second_from: int | None = None  # the first token of a pair's second text; None: there is none
    # [num_known] int32, token_ids once more where they were packed before; for this process alone
    packed_ids: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDelta:
    """Page ids written into one row of one group's page table."""

    row: int
    group: int  # index into the model's cache groups
    start: int  # first entry written
    page_ids: tuple[int, ...]  # of a STATE group: slots (cache/states.py has the entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlayDelta:
    """Input rows of a request that has entered its row, put into slots of the overlay."""

    row: int
    start: int  # position of the first token whose row is put there
    slots: tuple[int, ...]  # one for each token from start to the source's last
    source: InputRows


Delta = JoinDelta | PageDelta | OverlayDelta


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Neighbouring tokens of a step that are prompt, and whose next token is prompt too: the
    log-probability of that next token is wanted.
    """

    index: int  # of the step's rows
    start: int  # token of the step, from 0
    length: int  # tokens, at least 1
    top: int  # most likely tokens wanted with each


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that one row may take."""

    row: int  # of those that are sampled: one of each request, in a round all of its rows
    words: bytes  # int32 [ceil(vocab / 32)]  bit t % 32 of word t // 32: token t


@dataclass(frozen=True, slots=True)
class GivenDrafts:
    """The drafts of one row of a round, which the host names in place of its proposer."""

    index: int  # of the step's rows
    token_ids: tuple[int, ...]  # [num_drafts] fewer than the round has rows of a request
    parents: tuple[int, ...]  # [num_drafts] as RowDrafts has them


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Which rows a step holds and how many tokens each brings; equal layouts need no staging."""

    rows: tuple[int, ...]  # [num_reqs] request-table rows, never PAD_ROW
    extend_lens: tuple[int, ...]  # [num_reqs] tokens computed in this step
    emits: tuple[bool, ...]  # [num_reqs] False for a prompt chunk that is not the last
    # [num_reqs][extend_len] the row of the same request that each row hangs on, always an earlier
    # one, or -1: the prefix.  None: the mask says all, or a proposer writes them on the device.
    parents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.parents is None:
            return
        for parents, extend in zip(self.parents, self.extend_lens, strict=True):
            assert len(parents) == extend, f"{len(parents)} parents of {extend} rows"
            assert all(-1 <= parent < row for row, parent in enumerate(parents)), parents

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.extend_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of the engine.

    `prefix_lens_bound` is exact for a row that still runs; a row the device has frozen meanwhile
    has less, and is treated as padding there.  Behind a round whose outputs the host has not seen
    it is an upper bound: the device alone knows how many tokens the round emitted.
    """

    epoch: int  # strictly increasing
    layout: StepLayout
    is_ragged: bool  # each row has its own number of tokens; otherwise all have the same
    mask: MaskKind = MaskKind.CAUSAL  # which keys of the step a row sees
    is_round: bool = False  # each row is a root and the drafts below it, which a proposer writes on
    # the device: a chain where the mask is CAUSAL; of them the device accepts a path per request
    prefix_lens_bound: tuple[int, ...]  # [num_reqs] tokens in the cache before the step
    sampler: SamplerTier  # the widest any of its rows needs
    logprobs: bool  # some row asked for log-probabilities
    deltas: tuple[Delta, ...]  # applied to the request table before this step, in order
    prompt_spans: tuple[PromptSpan, ...] = ()  # in the order of the rows, at most one each
    observed: bool = True  # by the drafter, where there is one; False: no row drafts again
    tells_drafts: tuple[int, ...] = ()  # of a round: rows of which the host asks what was drafted
    shares_prefix: bool = False  # a decode in which many rows may read the same pages of a prefix
    # Of rows that may not take every token, in their order.  None: every row may, and the step's
    # program knows of no masks.
    masks: tuple[TokenMask, ...] | None = None
    given: tuple[GivenDrafts, ...] = ()  # of a round: one of each row that has masks, in order
    has_overlay: bool = False  # some token takes its input row from the overlay
    ends: frozenset[End] = GENERATES  # of its requests: what the step's program ends in

    @property
    def kind(self) -> str:
        """For people."""
        extend_len = None if self.is_ragged else max(self.layout.extend_lens, default=1)
        return kind_of_step(extend_len, is_round=self.is_round)

    @property
    def kv_lens_bound(self) -> tuple[int, ...]:
        """[num_reqs] prefix + extend, always."""
        pairs = zip(self.prefix_lens_bound, self.layout.extend_lens, strict=True)
        return tuple([prefix + extend for prefix, extend in pairs])


def kind_of_step(extend_len: int | None, *, is_round: bool) -> str:
    """For people.  extend_len: tokens of every row, None: ragged."""
    if is_round:
        return "round"
    names = {None: "ragged step", 1: "decode step"}
    return names.get(extend_len, f"step of {extend_len} tokens each")


def padded_step(step: Step, pad_lens: tuple[int, ...]) -> Step:
    """`step` with its padded rows spelled out: what a host plan is made from.

    pad_lens: [padded rows] tokens of each.
    """
    layout, num = step.layout, len(pad_lens)
    return replace(
        step,
        layout=replace(
            layout,
            rows=layout.rows + (PAD_ROW,) * num,
            extend_lens=layout.extend_lens + pad_lens,
            emits=layout.emits + (False,) * num,
            parents=padded_parents(layout, pad_lens),
        ),
        prefix_lens_bound=step.prefix_lens_bound + (PAD_PREFIX_LEN,) * num,
    )


def leading_rows(step: Step, num_rows: int) -> Step:
    """`step` with its first rows alone, for a host plan of these."""
    layout = step.layout
    kept = replace(
        layout,
        rows=layout.rows[:num_rows],
        extend_lens=layout.extend_lens[:num_rows],
        emits=layout.emits[:num_rows],
        parents=None if layout.parents is None else layout.parents[:num_rows],
    )
    return replace(step, layout=kept, prefix_lens_bound=step.prefix_lens_bound[:num_rows])


def padded_parents(
    layout: StepLayout, pad_lens: tuple[int, ...]
) -> tuple[tuple[int, ...], ...] | None:
    """[padded rows][their tokens] of a tree: each padded token hangs on its row's prefix."""
    if layout.parents is None:
        return None
    return layout.parents + tuple((-1,) * extend for extend in pad_lens)


class RunKind(Enum):
    """How a step was executed."""

    GRAPH = "graph"  # replayed
    CAPTURE = "capture"  # replayed, and captured just before
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class StepRun:
    """How a step was executed, and what it computed, padding included."""

    kind: RunKind
    padded_reqs: int
    padded_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """Log-probabilities of one token, sampled or prompt, natural log, of the model's raw
    distribution.
    """

    chosen: float
    top_ids: tuple[int, ...]  # most likely first
    top_values: tuple[float, ...]

    def best(self, count: int) -> "RowLogprobs":
        """The same with the `count` most likely tokens only."""
        return replace(self, top_ids=self.top_ids[:count], top_values=self.top_values[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDrafts:
    """What a round drafted for one request, in the order of its rows; none that hang nowhere."""

    token_ids: tuple[int, ...]  # [num_drafts]
    parents: tuple[int, ...]  # [num_drafts] the draft each hangs on, always an earlier one; -1: the
    # root, the request's newest token

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int] | None) -> "RowDrafts":
        """Of the rows of a request, its root first.  parents: as in runner.proposer.DraftTree;
        None: a chain."""
        above = range(-1, len(tokens) - 1) if parents is None else parents
        places = {0: -1}  # by row, of the drafts that hang somewhere
        for row in range(1, len(tokens)):
            if above[row] in places:
                places[row] = len(places) - 1
        rows = [row for row in places if row]
        return cls(
            token_ids=tuple([tokens[row] for row in rows]),
            parents=tuple([places[above[row]] for row in rows]),
        )

    def taken(self, emitted: Sequence[int]) -> tuple[int, ...]:
        """The drafts that a round took which emitted these tokens; siblings differ in token."""
        path, at = [], -1
        for token in emitted[:-1]:
            child = self.child(at, token)
            assert child is not None, f"a round emitted {emitted}, which {self} does not have"
            at = child
            path.append(at)
        return tuple(path)

    def children(self, above: int) -> tuple[int, ...]:
        """The drafts that hang on draft `above`; on the root: -1."""
        return tuple([index for index, parent in enumerate(self.parents) if parent == above])

    def child(self, above: int, token: int) -> int | None:
        """That of them which is `token`."""
        return next((i for i in self.children(above) if self.token_ids[i] == token), None)

    def below(self, said: Sequence[int]) -> "RowDrafts":
        """What hangs below these tokens, with the last of them as the root; nothing where they
        leave the tree."""
        at = -1
        for token in said:
            child = self.child(at, token)
            if child is None:
                return NO_ROW_DRAFTS
            at = child
        places = {at: -1}
        kept = [at]
        for index, parent in enumerate(self.parents):
            if parent in places and index != at:
                places[index] = len(places) - 1
                kept.append(index)
        return RowDrafts(
            token_ids=tuple([self.token_ids[index] for index in kept[1:]]),
            parents=tuple([places[self.parents[index]] for index in kept[1:]]),
        )

    def first(self, count: int) -> "RowDrafts":
        """The first so many of them."""
        return RowDrafts(token_ids=self.token_ids[:count], parents=self.parents[:count])

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


NO_ROW_DRAFTS = RowDrafts(token_ids=(), parents=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """What a retired step produced, as host values, in the order of the step's rows."""

    epoch: int
    # [num_reqs][num_emitted] none: chunk not final, frozen, or failed; several: a round's path
    token_ids: tuple[tuple[int, ...], ...]
    finish: tuple[FinishCode, ...]  # [num_reqs] set in the step that freezes the row
    logprobs: tuple[tuple[RowLogprobs, ...], ...] | None  # as token_ids, when the step asked
    prompt_logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(
        default_factory=dict
    )  # row of the step -> [length of its span], when the step asked for them
    drafts: Mapping[int, RowDrafts] = field(default_factory=dict)  # of the rows that were asked of
    # [num_reqs] tokens that the row's checkpoint slots stand for since this step; 0: it used none.
    # None: the model keeps no states
    state_lens: tuple[int, ...] | None = None
    # [num_reqs] of [width] float32: what Pooling makes of the row's tokens in this step.  None: no
    # request of the step pools
    pooled: tuple[bytes, ...] | None = None
