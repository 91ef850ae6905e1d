"""Backends with a fault in one layer, in steps of one form; the torch backend does the rest."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend, LayerCache, Limits, Part
from paceline.kernels.step_view import StepView

ROUND_ROWS = 4  # of the rounds that are wrong; no prompt of the tests is so short


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FormPlan:
    inner: Any
    rows: int  # of a request in the step


class FaultInLayer(AttentionBackend):
    """Layer `layer_id` answers with the wrong sign where a request brings `rows` rows."""

    layer_id: ClassVar[int]
    rows: ClassVar[int] = ROUND_ROWS
    capabilities = TorchBackend.capabilities
    kept_fields = TorchBackend.kept_fields

    def __init__(self) -> None:
        self._inner = TorchBackend()

    def make_buffers(self, limits: Limits) -> Any:
        return self._inner.make_buffers(limits)

    def plan(self, view: StepView, buffers: Any) -> FormPlan:
        return FormPlan(inner=self._inner.plan(view, buffers), rows=view.max_extend_len)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: FormPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = self._inner.forward(q, k, v, layer, plan.inner, part)
        is_wrong = layer.spec.layer_id == self.layer_id and plan.rows == self.rows
        return (-out if is_wrong else out), lse


class RoundFault0(FaultInLayer):
    name = "round-fault-0"
    layer_id = 0


class RoundFault3(FaultInLayer):
    name = "round-fault-3"
    layer_id = 3


class DecodeFault2(FaultInLayer):
    name = "decode-fault-2"
    layer_id = 2
    rows = 1
