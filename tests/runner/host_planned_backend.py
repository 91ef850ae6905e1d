"""A backend for tests that plans on the host, as FlashInfer does: it refuses to run unplanned."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend, LayerCache, Limits, Part
from paceline.core.step import Step
from paceline.kernels.step_view import StepView


@dataclass
class HostPlans:
    """What the host planned: the kv lengths of every step, in the order of the calls."""

    planned: list[tuple[int, ...]] = field(default_factory=list)
    used: int = 0  # how many of them the last forward pass could see


class HostPlannedBackend(AttentionBackend):
    """The torch backend behind a host plan."""

    name = "host-planned"
    capabilities = replace(TorchBackend.capabilities, host_plan=True)

    def __init__(self) -> None:
        self.plans = HostPlans()
        self._inner = TorchBackend()

    def make_buffers(self, limits: Limits) -> Any:
        return self._inner.make_buffers(limits)

    def plan(self, view: StepView, buffers: Any) -> Any:
        return self._inner.plan(view, buffers)

    def host_plan(self, step: Step, buffers: Any) -> None:
        self.plans.planned.append(step.kv_lens_bound)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Any, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        if layer.spec.layer_id == 0:
            assert len(self.plans.planned) > self.plans.used, "forward ran without a host plan"
            self.plans.used = len(self.plans.planned)
        return self._inner.forward(q, k, v, layer, plan, part)
