"""A backend with a watcher: remembers the last plan, and keeps books of what forward did.

The books are tensors at fixed addresses, written by operators that a graph records with the rest,
so that they tell of a replay as of an eager run.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend, LayerCache, Limits, Part
from paceline.core.errors import KernelArgumentError
from paceline.core.step import Step
from paceline.kernels.step_view import StepView
from paceline.runner.sanitizer.poison import bits_of

_ARGUMENTS = ("q", "k", "v")


class Watched(AttentionBackend):
    """Forwards every hook to `inner`.

    A plan's tensors stay where they are, so that after a replay the plan of the capture shows what
    the replay wrote.
    lses: [num_layers] of [max_tokens, num_heads]  float32  what forward returned; NaN elsewhere
    was_changed: [num_layers, 3]  bool  whether forward changed q, k, v
    layers_with_lse: those whose forward returned one when Python called it last
    """

    def __init__(self, inner: AttentionBackend, *, prefix_alone: bool) -> None:
        self._inner = inner
        self._prefix_alone = prefix_alone
        self.name = inner.name
        self.capabilities = inner.capabilities
        self.kept_fields = inner.kept_fields
        self.planned: tuple[StepView, Any] | None = None  # of the last call
        self.layers_with_lse: set[int] = set()
        self.lses: tuple[Tensor, ...] = ()
        self.was_changed = torch.zeros(0)

    def make_buffers(self, limits: Limits) -> Any:
        tokens, device = limits.max_tokens, limits.device
        self.lses = tuple(
            torch.full((tokens, layer.num_heads), float("nan"), device=device)
            for layer in limits.layers
        )
        size = (len(limits.layers), len(_ARGUMENTS))
        self.was_changed = torch.zeros(size, dtype=torch.bool, device=limits.device)
        return self._inner.make_buffers(replace(limits, prefix_alone=self._prefix_alone))

    def plan(self, view: StepView, buffers: Any) -> Any:
        plan = self._inner.plan(view, buffers)
        self.planned = (view, plan)
        return plan

    def host_plan(self, step: Step, buffers: Any) -> None:
        self._inner.host_plan(step, buffers)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Any, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """`inner`'s answer, refused where its form is not the contract's.

        Raises KernelArgumentError for that; mutates the books.
        """
        number, heads = layer.spec.layer_id, layer.spec.num_heads
        # As bits: NaN equals itself.
        before = [bits_of(tensor).clone() for tensor in (q, k, v)]
        out, lse = self._inner.forward(q, k, v, layer, plan, part)
        self._note_changes(number, before, (q, k, v))
        _require("out", out, (q.shape[0], heads, layer.spec.v_head_dim), q.dtype)
        self.layers_with_lse.discard(number)
        if lse is not None or part is not Part.ALL:
            _require("lse", lse, (q.shape[0], heads), torch.float32)
            assert lse is not None
            self.lses[number][: q.shape[0]].copy_(lse)
            self.layers_with_lse.add(number)
        return out, lse

    def clear(self) -> None:
        """Nothing returned yet, nothing changed yet."""
        for lse in self.lses:
            lse.fill_(float("nan"))
        self.was_changed.zero_()

    def changed_arguments(self) -> list[str]:
        """What forward changed since `clear`, by layer."""
        return [
            f"forward of layer {layer} must leave {name} alone, got it changed"
            for layer, changed in enumerate(self.was_changed.tolist())
            for name, is_changed in zip(_ARGUMENTS, changed, strict=True)
            if is_changed
        ]

    def _note_changes(self, layer: int, before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
        for index, (was, tensor) in enumerate(zip(before, now, strict=True)):
            flag = self.was_changed[layer, index]
            flag.logical_or_((was != bits_of(tensor)).any())


def watch(inner: AttentionBackend, *, prefix_alone: bool) -> Watched:
    """`inner` watched, by a class that reports call its backend's: their lines name its file.

    prefix_alone: what it is to be asked for, see Limits.
    """
    named: type[Watched] = type("Watched", (Watched,), {"__module__": type(inner).__module__})
    return named(inner, prefix_alone=prefix_alone)


def _require(name: str, got: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse what a backend may not return, before it is broadcast or cast away."""
    if isinstance(got, Tensor) and tuple(got.shape) == shape and got.dtype is dtype:
        return
    found = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
    raise KernelArgumentError.about(
        f"{name} of forward",
        expected=f"{dtype} {list(shape)}",
        got=found,
        remedy="return what AttentionBackend.forward promises",
    )
