"""The attention backend contract (docs/architecture.md, "The attention contract").

requests -> Step -> StepBuffers.fill -> derive -> StepView -> plan -> Plan -> forward

A backend is `capabilities` (data) and the methods of `AttentionBackend`.  It states nothing about
padding, keeps no state between calls, and reads no device value on the host.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from paceline.attention.held import tensor_bytes
from paceline.core.errors import ConfigError
from paceline.core.model.config import Heads
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.scaled_latents import ScaledLatents
from paceline.kernels.step_view import StepView


class GraphSupport(IntEnum):
    """Which steps a backend can hold in a graph."""

    NEVER = 0
    DECODE = 1  # one query row per request
    UNIFORM = 2  # any fixed number of query rows per request
    ALWAYS = 3  # ragged steps too


class ChunkSupport(IntEnum):
    """Which layers that see the keys of a token's own chunk alone a backend serves, in a tree as
    its tree_windows say."""

    NEVER = 0
    WHOLE_PAGES = 1  # chunks of whole pages: a page table read from a chunk's first page on
    ALWAYS = 2


def needed_support(extend_len: int | None) -> GraphSupport:
    """What a backend must support for a step to be captured; others run eagerly.

    extend_len: tokens that every row brings, None: each its own number.
    """
    if extend_len is None:
        return GraphSupport.ALWAYS
    return GraphSupport.DECODE if extend_len == 1 else GraphSupport.UNIFORM


class Part(Enum):
    """Which keys `forward` attends to."""

    ALL = "all"  # prefix and step, under the plan's mask
    PREFIX = "prefix"  # the prefix alone, non-causal, for cascade and for layers whose prefix is an
    # encoder's rows; needs returns_lse.  The step's own k and v are not read
    STEP = "step"  # the step's own rows alone, from the k and v arguments, under the plan's mask;
    # needs step_alone.  The cache is not read, nor need it hold them


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do, as data.  None means: no limit."""

    device_types: frozenset[str]  # "cpu", "cuda"
    min_cuda_arch: tuple[int, int] | None  # compute capability
    dtypes: frozenset[torch.dtype]  # of q, k and v
    kv_dtypes: frozenset[torch.dtype]  # of the cache; torch.float8_e4m3fn is read with scales
    page_sizes: frozenset[int] | None  # tokens
    head_dims: frozenset[int] | None  # of Q and K, and of V
    v_head_dim_differs: bool  # V may have another head dim than K
    masks: frozenset[MaskKind]
    window: bool
    soft_cap: bool
    sinks: bool  # one more score per head in the softmax's denominator
    returns_lse: bool
    graph: GraphSupport
    host_plan: bool  # plans on the host, from exact lengths, before every run
    loads_dead_slots: bool = True  # multiplies slots it masks by 0: they must hold finite numbers;
    # False claims that it never does, and is held to it by NaN in every dead slot
    tree_windows: bool = True  # masks windows and chunks in a tree too: they follow the branch
    shares_prefixes: bool = False  # reads what many rows of a decode share once for several of them
    max_cuda_arch: tuple[int, int] | None = (
        None  # compute capability, of kernels for one generation
    )
    latent_dims: frozenset[tuple[int, int]] | None = None  # where V lies in K: columns that both
    # have, and those of K alone.  None: head_dims says it all
    scaled_latents: bool = False  # reads latents in float8 with a scale for each row
    step_alone: bool = False  # serves Part.STEP, with a log-sum-exp
    chunks: ChunkSupport = ChunkSupport.NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """What a model on a device asks of a backend."""

    device_type: str
    cuda_arch: tuple[int, int] | None
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the cache: dtype, or torch.float8_e4m3fn
    page_size: int
    heads: tuple[Heads, ...]  # of its layers, each once; those of most layers first
    window: bool  # some layer has a sliding one
    soft_cap: bool  # some layer has one
    sinks: bool  # some layer has them
    masks: frozenset[MaskKind]
    needs_lse: bool
    graph: GraphSupport  # the least that is wanted; NEVER when graphs are off
    encoder: bool = False  # some layer reads an encoder's rows: Part.PREFIX, at their lengths
    cache_free: bool = False  # some step has no cache: it attends to its own rows alone
    step_alone: bool = False  # Part.STEP is asked for
    chunks: frozenset[int] = frozenset()  # tokens of those that some layers see alone


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention layer's constants."""

    layer_id: int
    group: int  # index of its cache group
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float  # multiplies q.k
    window: Lookback | None  # keys visible; None = all
    soft_cap: float | None  # cap * tanh(score / cap)
    v_in_k: bool = False  # V is the leading columns of K, and v_cache a view of k_cache

    @property
    def chunk(self) -> Chunk | None:
        """The chunks that its tokens see their own of; None where they see past them."""
        return self.window if isinstance(self.window, Chunk) else None

    @property
    def sliding(self) -> int | None:
        """The window, for what has no chunks: keys visible, itself included; None = all.

        Raises ConfigError for a layer with chunks, which would be no window of their size.
        """
        if isinstance(self.window, Chunk):
            raise ConfigError.about(
                f"lookback of layer {self.layer_id}",
                expected="a sliding window, or none",
                got=self.window,
                remedy="take a backend that states chunks, as torch and triton do",
            )
        return self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest step the engine will ever build; `make_buffers` allocates for it.

    Padded rows and tokens count.  Of a drafter's passes the limits are its own.
    """

    device: torch.device
    dtype: torch.dtype  # of q, k and v
    kv_dtype: torch.dtype  # of the cache
    layers: tuple[AttentionSpec, ...]  # of each that attends; group: the index into
    # max_pages and windows
    max_reqs: int  # padded requests of a step
    max_tokens: int  # padded tokens of a step
    max_pages: tuple[int, ...]  # [num_groups] page-table width
    windows: tuple[Lookback | None, ...]  # [num_groups] keys visible; None = all
    page_size: int  # 0 where no layer attends
    share_prefixes: bool = False  # decodes whose view says so read what rows share once
    prefix_alone: bool = False  # forward is asked for Part.PREFIX of causal steps too: the cache is
    # frozen, and the step's own keys are not in it

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Those of its layers, each once."""
        return tuple(dict.fromkeys(spec.chunk for spec in self.layers if spec.chunk is not None))

    def parts(self, mask: MaskKind) -> tuple[Part, ...]:
        """What `forward` may ask of the pages in a step with `mask`, where a tree's own rows are
        attended to apart from them."""
        if mask is MaskKind.TREE:
            return (Part.PREFIX,)
        return (Part.ALL, Part.PREFIX) if self.prefix_alone else (Part.ALL,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCache:
    """One attention layer with the part of the KV pool it owns.

    A float8_e4m3fn cache holds value / scale and has both scales, or, of latents, neither and
    what lies beside its codes; any other has none of these.
    """

    spec: AttentionSpec
    k_cache: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]  NHD
    v_cache: Tensor  # [num_pages, page_size, num_kv_heads, v_head_dim]  NHD; may be the leading
    # columns of k_cache: a view with its strides
    k_scale: Tensor | None  # [1]  float32  true K = stored * scale
    v_scale: Tensor | None  # [1]  float32  true V = stored * scale
    sinks: Tensor | None  # [num_heads]  float32  a score per head that adds to the softmax's
    # denominator and no value; scale and soft cap do not touch it
    beside: ScaledLatents | None = None  # of latents in float8: k_cache and v_cache are their
    # codes, [num_pages, page_size, 1, v_head_dim], and a query's last columns meet what turned


Buffers = TypeVar("Buffers", default=Any)
Plan = TypeVar("Plan", default=Any)


class AttentionBackend(ABC, Generic[Buffers, Plan]):
    """Prepares and runs attention for every layer of a step.  Stateless: buffers are arguments.

    Buffers, Plan: types of its own; nobody else looks into a plan.
    """

    name: str
    capabilities: Capabilities
    kept_fields: frozenset[str] = frozenset()  # fields of its buffers that plan and
    # host_plan do not write anew in each step: constants, counters that a kernel leaves at 0

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Every reason why this backend cannot serve `config`; empty when it can."""
        from paceline.attention.capability import capability_reasons

        return capability_reasons(self.capabilities, config)

    @abstractmethod
    def make_buffers(self, limits: Limits) -> Buffers:
        """Allocate once everything whose address a graph may hold.

        In dataclasses, tuples, lists, dicts or plain objects: guard, sanitizer and memory budget
        walk them (attention/held.py).  plan and host_plan write in place and replace none.
        """

    def buffer_bytes(self, limits: Limits) -> int:
        """The most bytes `make_buffers` and host plans hold, for the memory budget.

        limits.device is the meta device, which stands for the one that is planned for
        (kernels/stand_in.py), or for any.  This counts what `make_buffers` allocates there; a
        backend that cannot, or that holds more, has a formula of its own.  Raises ConfigError where
        one that cannot has none.
        """
        try:
            buffers = self.make_buffers(limits)
        except RuntimeError as error:
            raise ConfigError.about(
                f"buffers of attention backend {self.name}",
                expected="allocated on the meta device, to be counted",
                got=f"{type(error).__name__}: {error}",
                remedy="count them in a buffer_bytes of its own",
            ) from error
        return tensor_bytes(buffers)

    @abstractmethod
    def plan(self, view: StepView, buffers: Buffers) -> Plan:
        """Derive the frozen plan: device-only, static shapes, in place in `buffers`.

        The same call in eager, capture and replay.  Recordable.  A grid or loop is bounded by the
        view's sizes, and ends early by the lengths on the device.  A backend that is never captured
        (GraphSupport.NEVER) may read the device here and in forward; each read waits for the
        steps before.  A backend that returns_lse and has
        no TREE may be given tree steps all the same: it plans them, and host_plans them, for
        Part.PREFIX, and its forward is then called with Part.PREFIX alone.
        """

    def host_plan(self, step: Step, buffers: Buffers) -> None:
        """Plan on the host, before every run of any kind; only with capabilities.host_plan.

        `step` has its padded rows spelled out.  Its prefix_lens_bound and kv_lens_bound are exact
        but for a row that the device froze since: there they are too long, and the row's page table
        holds PAD_PAGE alone.  (For such a backend the engine waits for a round's outputs before it
        plans the next.)  So a backend that plans on the host attends by the lengths it planned, not
        by the view's, and bounds its work by them.  An equal layout is no equal plan: in steady
        decode the layout stays and the lengths grow.  Queued before derive, on the step's stream.
        """
        raise NotImplementedError(f"{self.name} declares no host plan")

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Plan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """One attention layer; K and V of the step are already in the cache, but for Part.STEP.

        q: [padded_tokens, num_heads, head_dim]; k, v: [padded_tokens, num_kv_heads, *_head_dim].
        Returns out [padded_tokens, num_heads, v_head_dim] in q's dtype, and lse
        [padded_tokens, num_heads] float32 natural log (−inf where no key is visible).  lse may be
        None, but not with Part.PREFIX of a backend that returns_lse, nor with Part.STEP.  lse never
        counts a sink, and with a part out does not either: the merge applies it, once.  With
        Part.STEP heads and dims are those of the arguments.  Mutates only its buffers.
        """
