"""Backends under composition: one without trees, one that only listens."""

import inspect
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    LayerCache,
    Limits,
    Part,
)
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.step_view import StepView


class NoTree(AttentionBackend):
    """What a kernel library without tree masks can do, in torch; it never looks at a tree mask."""

    name = "no-tree"
    capabilities = replace(TorchBackend.capabilities, masks=frozenset({MaskKind.CAUSAL}))

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._torch = TorchBackend()

    def make_buffers(self, limits: Limits) -> Any:
        return self._torch.make_buffers(limits)

    def plan(self, view: StepView, buffers: Any) -> Any:
        causal = replace(view, mask=MaskKind.CAUSAL, tree_mask=None)
        return view.mask, self._torch.plan(causal, buffers)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Any, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """Of a tree the prefix alone; an empty prefix leaves its output as it was allocated."""
        mask, inner = plan
        assert mask is MaskKind.CAUSAL or part is Part.PREFIX, f"{part} of a {mask} step"
        self.parts.append(part)
        out, lse = self._torch.forward(q, k, v, layer, inner, part)
        if lse is not None:
            out = out.masked_fill(lse.isneginf().unsqueeze(-1), float("nan"))
        return out, lse


class Listener(NoTree):
    """Remembers the name and the arguments of every call, its own instance left out."""

    name = "listener"
    capabilities = replace(NoTree.capabilities, host_plan=True)
    heard: ClassVar[list[tuple[str, tuple[object, ...]]]] = []

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        self.heard.append(("unsupported_reasons", (config,)))
        return [f"{self.name} is busy"]

    def buffer_bytes(self, limits: Limits) -> int:
        self.heard.append(("buffer_bytes", (limits,)))
        return len(self.name)

    def make_buffers(self, limits: Limits) -> Any:
        self.heard.append(("make_buffers", (limits,)))
        return f"buffers of {self.name}"

    def plan(self, view: StepView, buffers: Any) -> Any:
        self.heard.append(("plan", (view, buffers)))
        return f"plan of {self.name}"

    def host_plan(self, step: Step, buffers: Any) -> None:
        self.heard.append(("host_plan", (step, buffers)))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Any, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        self.heard.append(("forward", (q, k, v, layer, plan, part)))
        return q, None


def listener(called: str) -> type[Listener]:
    """A listener of its own."""
    return type("Listening", (Listener,), {"name": called, "heard": []})


def hooks() -> list[str]:
    """The public methods of the contract: what a composition has to forward."""
    return [
        name
        for name, method in vars(AttentionBackend).items()
        if not name.startswith("_")
        and (inspect.isfunction(method) or isinstance(method, classmethod | staticmethod))
    ]


def facts() -> set[str]:
    """The class attributes of the contract: what a composition has to state."""
    return set(AttentionBackend.__annotations__)


def heard_by(listening: type[Listener], name: str) -> list[tuple[object, ...]]:
    """The arguments of each call of one hook."""
    return [given for called, given in listening.heard if called == name]
