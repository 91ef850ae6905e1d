"""Cascade: trees for backends that mask none, or none with windows, but return a log-sum-exp.

Of a tree step the inner backend attends to the prefix alone, which no mask divides, and our own
kernels to the step alone, under the ancestors' mask; a merge by log-sum-exp joins both parts and
applies the sinks, once.  A window hides keys by position, also within the prefix, so windowed
layers of a tree step take our paged kernel over all their keys: the window keeps that small.  A
chunk hides keys by position too, but of the prefix all or none that lie in it: two parts will do.
Every other step is the inner backend's alone.
"""

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.attention.names import Cascade
from paceline.attention.paged import attend_cpu, paged_call
from paceline.attention.step_rows import attend_step
from paceline.core.errors import ConfigError
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.merge_partials import merge_partials
from paceline.kernels.paged_attention import paged_extend
from paceline.kernels.stand_in import device_type
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CascadePlan:
    """The inner backend's plan, and the step's own tables when it is a tree."""

    inner: Any
    tree: PageTablePlan | None  # None: the inner backend serves the whole step


@dataclass(frozen=True, kw_only=True)
class CascadeBackend(AttentionBackend[Any, CascadePlan]):
    """`inner` with trees; `cascade` makes it."""

    inner: AttentionBackend
    name: str
    capabilities: Capabilities
    kept_fields: frozenset[str]

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """What the inner backend lacks besides the tree, and what the tree part lacks."""
        if MaskKind.TREE not in config.masks:
            return self.inner.unsupported_reasons(config)
        asked = replace(config, masks=config.masks - {MaskKind.TREE}, needs_lse=True)
        return self.inner.unsupported_reasons(asked) + _tree_reasons(config)

    def make_buffers(self, limits: Limits) -> Any:
        """The inner backend's buffers: the tree part has none that outlive a step."""
        return self.inner.make_buffers(limits)

    def buffer_bytes(self, limits: Limits) -> int:
        """Those of the inner backend."""
        return self.inner.buffer_bytes(limits)

    def plan(self, view: StepView, buffers: Any) -> CascadePlan:
        """The inner plan, which is one for Part.PREFIX when the step is a tree."""
        inner = self.inner.plan(view, buffers)
        is_tree = view.mask is MaskKind.TREE
        return CascadePlan(inner=inner, tree=page_table_plan(view) if is_tree else None)

    def host_plan(self, step: Step, buffers: Any) -> None:
        """Forwarded where the inner backend has one."""
        self.inner.host_plan(step, buffers)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: CascadePlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; a tree step returns its lse with either part."""
        if plan.tree is None:
            return self.inner.forward(q, k, v, layer, plan.inner, part)
        if part is Part.STEP:
            return attend_step(q, k, v, layer, plan.tree)
        if layer.spec.chunk is None and layer.spec.sliding is not None:
            return _windowed_tree(q, layer, plan.tree, part)
        prefix = self.inner.forward(q, k, v, layer, plan.inner, Part.PREFIX)
        if part is Part.PREFIX:
            return prefix
        return _with_tree(q, k, v, prefix, layer=layer, table=plan.tree)


def cascade(inner: AttentionBackend) -> CascadeBackend:
    """`inner` composed with our tree kernel: all it can do, and MaskKind.TREE.

    Its name is cascade(name of inner), which `load_backend` takes too: what an engine chose, what
    its graphs are keyed by and what a message names is the composition that runs.
    Raises ConfigError where there is no lse to merge by.
    """
    can = inner.capabilities
    if not can.returns_lse:
        raise ConfigError.about(
            "attention backend under a cascade",
            expected="one that returns a log-sum-exp",
            got=inner.name,
            remedy="choose a backend with a tree mask, or add returns_lse to this one",
        )
    return CascadeBackend(
        inner=inner,
        name=str(Cascade(inner.name)),
        capabilities=replace(can, masks=can.masks | {MaskKind.TREE}, tree_windows=True),
        kept_fields=inner.kept_fields,
    )


def needs_cascade(can: Capabilities, masks: frozenset[MaskKind], *, lookback: bool) -> bool:
    """Whether trees are asked of a backend that cannot serve them, but could be composed.

    lookback: whether some layer has a window or chunks.
    """
    is_served = MaskKind.TREE in can.masks and (can.tree_windows or not lookback)
    return MaskKind.TREE in masks and not is_served and can.returns_lse


def _tree_reasons(config: AttentionConfig) -> list[str]:
    """Why a step's own rows cannot be attended to apart from its prefix."""
    reasons = []
    if config.kv_dtype != config.dtype:
        reasons.append(
            f"KV dtype must be {config.dtype} under a cascade, got {config.kv_dtype}: a tree's new "
            "keys would be read as computed, not as the cache rounds them"
        )
    is_here = config.device_type == "cuda" and torch.cuda.is_available()
    if is_here and importlib.util.find_spec("triton") is None:
        reasons.append("triton must be installed for a cascade's tree part, got no such package")
    return reasons


def _with_tree(
    q: Tensor,  # [padded_tokens, num_heads, head_dim]
    k: Tensor,  # [padded_tokens, num_kv_heads, head_dim]
    v: Tensor,  # [padded_tokens, num_kv_heads, v_head_dim]
    prefix: tuple[Tensor, Tensor | None],  # what the inner backend returned for Part.PREFIX
    *,
    layer: LayerCache,
    table: PageTablePlan,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a prefix and of the step's own rows."""
    prefix_out, prefix_lse = prefix
    assert prefix_lse is not None, "a backend that returns_lse returns it with Part.PREFIX"
    out, lse = attend_step(q, k, v, layer, table)
    merge_partials(
        prefix_out, prefix_lse.contiguous(), out, lse, sinks=layer.sinks, out=out, lse=lse
    )
    return out, lse


def _windowed_tree(
    q: Tensor, layer: LayerCache, table: PageTablePlan, part: Part
) -> tuple[Tensor, Tensor | None]:
    """A windowed layer's whole tree step through our own paged kernels."""
    if device_type(q.device) == "cpu":
        return attend_cpu(q, layer, table, part, wants_lse=True)
    call = paged_call(q, layer, table, part)
    paged_extend(call)
    return call.out, call.lse
