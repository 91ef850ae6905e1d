"""The running sum of the documentation's example: s = 7/8 s + x, and s is handed on."""

from torch import Tensor

from paceline.core.model.config import RowPart
from paceline.proof.oracle.methods.recurrence import Recurrence, State

_WIDTH = 8
_DECAY = 0.875


class RunningSum(Recurrence):
    """One part, of float32."""

    kind = "sum"
    parts = (RowPart("sum", (_WIDTH,), dtype="float32"),)
    width = _WIDTH
    out_shape = (_WIDTH,)

    def step(self, state: State, row: Tensor) -> tuple[State, Tensor]:
        behind = _DECAY * state["sum"] + row
        return {"sum": behind}, behind
