"""Hybrid: one backend for prefill, another for decode and verification.

A step belongs to the decode backend when every request brings the same few rows, or when its mask
is that of trees or the full one (which are uniform by definition); all others, and steps that see
ahead within blocks of a prompt, belong to the prefill backend.  The decision is made in `plan` and
travels in the plan, so forward cannot disagree.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.names import Pair
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.step_view import StepView

T = TypeVar("T")
_OF_PROMPTS = frozenset({MaskKind.CAUSAL, MaskKind.BLOCK})  # masks of a prefill
MAX_DECODE_ROWS = 64  # of a request, under a causal mask: a step with more is a prefill in any mode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HybridBuffers:
    """What each backend allocated."""

    prefill: Any
    decode: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HybridPlan:
    """Which backend serves the step, with its plan."""

    backend: AttentionBackend
    plan: Any


@dataclass(frozen=True, kw_only=True)
class HybridBackend(AttentionBackend[HybridBuffers, HybridPlan]):
    """Two backends by turns; `hybrid` makes it."""

    prefill: AttentionBackend
    decode: AttentionBackend
    name: str
    capabilities: Capabilities
    kept_fields: frozenset[str]

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """The reasons of both, each for the steps it would serve, prefixed by its name."""
        prompts = replace(config, masks=config.masks & _OF_PROMPTS)
        others = replace(config, masks=config.masks - {MaskKind.BLOCK})
        halves = ((self.prefill, prompts), (self.decode, others))
        return [
            f"{half.name}: {reason}"
            for half, asked in halves
            for reason in half.unsupported_reasons(asked)
        ]

    def make_buffers(self, limits: Limits) -> HybridBuffers:
        """The buffers of both: either may get any step that fits the limits."""
        return HybridBuffers(
            prefill=self.prefill.make_buffers(limits), decode=self.decode.make_buffers(limits)
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """Those of both."""
        return self.prefill.buffer_bytes(limits) + self.decode.buffer_bytes(limits)

    def plan(self, view: StepView, buffers: HybridBuffers) -> HybridPlan:
        """The plan of the backend this step belongs to."""
        if serves_decode(view):
            return HybridPlan(backend=self.decode, plan=self.decode.plan(view, buffers.decode))
        return HybridPlan(backend=self.prefill, plan=self.prefill.plan(view, buffers.prefill))

    def host_plan(self, step: Step, buffers: HybridBuffers) -> None:
        """Forwarded to each backend that has one and may get the step; see `may_serve`."""
        for_prefill, for_decode = may_serve(step)
        if for_prefill and self.prefill.capabilities.host_plan:
            self.prefill.host_plan(step, buffers.prefill)
        if for_decode and self.decode.capabilities.host_plan:
            self.decode.host_plan(step, buffers.decode)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: HybridPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward."""
        return plan.backend.forward(q, k, v, layer, plan.plan, part)


def serves_decode(view: StepView) -> bool:
    """Whether the step belongs to the decode backend."""
    if view.mask is not MaskKind.CAUSAL:
        return view.mask not in _OF_PROMPTS
    is_uniform = view.padded_tokens == view.padded_reqs * view.max_extend_len
    return is_uniform and view.max_extend_len <= MAX_DECODE_ROWS


def may_serve(step: Step) -> tuple[bool, bool]:
    """(prefill, decode): which of the two `serves_decode` may choose for a step's view.

    Both may in one case: requests of a ragged step that happen to extend alike.  Their view is
    uniform at its exact size, and ragged when it is padded to a number of tokens, which the step
    does not tell.
    """
    if step.mask is not MaskKind.CAUSAL:
        return step.mask in _OF_PROMPTS, step.mask not in _OF_PROMPTS
    extends = set(step.layout.extend_lens)
    is_short_and_alike = len(extends) <= 1 and max(extends, default=0) <= MAX_DECODE_ROWS
    if not is_short_and_alike:
        return True, False
    return step.is_ragged, True


def hybrid(prefill: AttentionBackend, decode: AttentionBackend) -> HybridBackend:
    """`prefill` and `decode` as one backend named prefill+decode: what both can do, the masks of
    `decode`, and blocks where `prefill` sees them.
    """
    return HybridBackend(
        prefill=prefill,
        decode=decode,
        name=str(Pair(prefill.name, decode.name)),
        capabilities=_common(prefill.capabilities, decode.capabilities),
        kept_fields=prefill.kept_fields | decode.kept_fields,
    )


def _common(prefill: Capabilities, decode: Capabilities) -> Capabilities:
    """What both can do.  Blocks are asked of `prefill` alone, other masks than the causal one of
    `decode`."""
    arches = [arch for arch in (prefill.min_cuda_arch, decode.min_cuda_arch) if arch is not None]
    last = [arch for arch in (prefill.max_cuda_arch, decode.max_cuda_arch) if arch is not None]
    return Capabilities(
        device_types=prefill.device_types & decode.device_types,
        min_cuda_arch=max(arches, default=None),
        max_cuda_arch=min(last, default=None),
        dtypes=prefill.dtypes & decode.dtypes,
        kv_dtypes=prefill.kv_dtypes & decode.kv_dtypes,
        page_sizes=_both(prefill.page_sizes, decode.page_sizes),
        head_dims=_both(prefill.head_dims, decode.head_dims),
        v_head_dim_differs=prefill.v_head_dim_differs and decode.v_head_dim_differs,
        masks=(decode.masks - (_OF_PROMPTS - prefill.masks)) | (prefill.masks & {MaskKind.BLOCK}),
        window=prefill.window and decode.window,
        soft_cap=prefill.soft_cap and decode.soft_cap,
        sinks=prefill.sinks and decode.sinks,
        returns_lse=prefill.returns_lse and decode.returns_lse,
        graph=min(prefill.graph, decode.graph),
        host_plan=prefill.host_plan or decode.host_plan,
        loads_dead_slots=prefill.loads_dead_slots or decode.loads_dead_slots,
        tree_windows=decode.tree_windows,
        shares_prefixes=decode.shares_prefixes,
        scaled_latents=prefill.scaled_latents and decode.scaled_latents,
        step_alone=prefill.step_alone and decode.step_alone,
        chunks=min(prefill.chunks, decode.chunks),
        latent_dims=_both(prefill.latent_dims, decode.latent_dims),
    )


def _both(left: frozenset[T] | None, right: frozenset[T] | None) -> frozenset[T] | None:
    """The intersection, where None is everything."""
    if left is None or right is None:
        return left if right is None else right
    return left & right
