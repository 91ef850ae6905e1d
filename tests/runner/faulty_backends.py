"""Backends with one fault each, of the kind that reads dead bytes; the torch backend does the rest.

Each adds what it wrongly reads to its output, so that only the sanitizer can tell.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend, LayerCache, Limits, Part
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wrapped:
    """The torch backend's buffers and one more."""

    inner: Any
    scratch: Tensor  # [max_tokens]  float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrappedPlan:
    inner: Any
    view: StepView
    scratch: Tensor  # [max_tokens]  float32


class WrappedBackend(AttentionBackend):
    """Right: `extra` adds nothing."""

    name = "wrapped"
    capabilities = TorchBackend.capabilities
    kept_fields = TorchBackend.kept_fields

    def __init__(self) -> None:
        self._inner = TorchBackend()

    def make_buffers(self, limits: Limits) -> Wrapped:
        return Wrapped(
            inner=self._inner.make_buffers(limits), scratch=torch.zeros(limits.max_tokens)
        )

    def plan(self, view: StepView, buffers: Wrapped) -> WrappedPlan:
        inner = self._inner.plan(view, buffers.inner)
        return WrappedPlan(inner=inner, view=view, scratch=buffers.scratch)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: WrappedPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = self._inner.forward(q, k, v, layer, plan.inner, part)
        if plan.view.max_extend_len > 1:  # prefill is right, so that decode can show the fault
            return out, lse
        extra = self.extra(layer, plan, out)
        return (out if extra is None else (out + extra).to(out.dtype)), lse

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor | None:
        return None


class ReadsTail(WrappedBackend):
    """Reads the length behind the last padded row."""

    name = "reads-tail"

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        lens = plan.view.kv_lens
        behind = lens.as_strided((1,), (1,), lens.shape[0])
        return behind.to(out.dtype).view(1, 1, 1)


class ReadsTailOfPrompts(ReadsTail):
    """The same for the first token of a prefill, in one layer."""

    name = "reads-tail-of-prompts"

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self._layer_id = layer_id

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: WrappedPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = super().forward(q, k, v, layer, plan, part)
        if layer.spec.layer_id == self._layer_id and plan.view.max_extend_len > 1:
            out[:1] += self.extra(layer, plan, out)
        return out, lse


class ReadsPaddedRow(WrappedBackend):
    """Adds the last row's output, which is padding, to every row's."""

    name = "reads-padded-row"

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        return out[-1:]


class SharesWork(WrappedBackend):
    """The last bits of a row follow what padded rows hold, as where a kernel orders rows anew."""

    name = "shares-work"

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        return out[-1:] * 1e-6


class ReadsSlot(WrappedBackend):
    """Adds the value at one position of each row's table, counted from kv_len."""

    name = "reads-slot"

    def __init__(self, offset: int) -> None:
        super().__init__()
        self._offset = offset

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        group, page_size = plan.view.groups[layer.spec.group], layer.v_cache.shape[1]
        position = (plan.view.kv_lens + self._offset).long().clamp(min=0)
        page = group.page_table.gather(1, (position // page_size).unsqueeze(1)).squeeze(1).long()
        slots = page * page_size + position % page_size
        values = layer.v_cache.flatten(0, 1).index_select(0, slots).float().mean((1, 2))
        return values.index_select(0, plan.view.req_ids).view(-1, 1, 1)


class ReadsFreePage(WrappedBackend):
    """Adds what lies on a page of nobody's in the step."""

    name = "reads-free-page"

    def __init__(self, page: int) -> None:
        super().__init__()
        self._page = page

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        return layer.k_cache[self._page].mean()


class ReadsStaleScratch(WrappedBackend):
    """Reads a buffer before it writes it."""

    name = "reads-stale-scratch"

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        stale = plan.scratch[: out.shape[0]].clone()
        plan.scratch[: out.shape[0]].copy_(plan.view.positions)
        return stale.view(-1, 1, 1)


class KeepsCounter(ReadsStaleScratch):
    """The same, as a buffer that it says lasts and leaves as it was."""

    name = "keeps-counter"
    kept_fields = frozenset({"scratch"})

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        scratch = plan.scratch[: out.shape[0]]
        scratch.add_(1)
        scratch.sub_(1)
        return scratch.view(-1, 1, 1).clone()


class WritesFreePage(ReadsFreePage):
    """Writes such a page."""

    name = "writes-free-page"

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        layer.k_cache[self._page].fill_(1.0)
        return torch.zeros(())


class HasHiddenState(WrappedBackend):
    """Counts its calls where nobody looks."""

    name = "has-hidden-state"

    def __init__(self) -> None:
        super().__init__()
        self._calls = torch.zeros(1)

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        self._calls.add_(1)
        return self._calls.view(1, 1, 1)


class MultipliesByZero(ReadsSlot):
    """Reads the slot behind the end and gives it no weight, as some kernels do."""

    name = "multiplies-by-zero"

    def __init__(self) -> None:
        super().__init__(0)

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        return super().extra(layer, plan, out) * 0


class SaysSo(MultipliesByZero):
    """The same, and its capabilities say so."""

    name = "says-so"
    capabilities = replace(TorchBackend.capabilities, loads_dead_slots=True)


class IndexesWithPoison(WrappedBackend):
    """Looks up what nobody wrote."""

    name = "indexes-with-poison"

    def extra(self, layer: LayerCache, plan: WrappedPlan, out: Tensor) -> Tensor:
        index = plan.scratch[:1].long()
        return torch.zeros(1, dtype=out.dtype).index_select(0, index).view(1, 1, 1)
