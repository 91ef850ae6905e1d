"""A backend with a watcher: remembers the last plan of each shape, for the invariants."""

from typing import Any

from torch import Tensor

from paceline.attention.contract import AttentionBackend, LayerCache, Limits, Part, StepView
from paceline.core.step import Step


class Watched(AttentionBackend):
    """Forwards every hook to `inner` and keeps what it planned.

    A plan's tensors stay where they are, so that after a replay the plan of the capture shows what
    the replay wrote.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.capabilities = inner.capabilities  # type: ignore[misc]
        self.kept_fields = inner.kept_fields  # type: ignore[misc]
        self.planned: tuple[StepView, Any] | None = None  # of the last call

    def make_buffers(self, limits: Limits) -> Any:
        return self._inner.make_buffers(limits)

    def plan(self, view: StepView, buffers: Any) -> Any:
        plan = self._inner.plan(view, buffers)
        self.planned = (view, plan)
        return plan

    def host_plan(self, step: Step, buffers: Any) -> None:
        self._inner.host_plan(step, buffers)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Any, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        return self._inner.forward(q, k, v, layer, plan, part)
