"""What an operation says its GPU kernel takes is what the launcher allocates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.kernels import draft_topk, draw, edit_logits, greedy, moe_experts
from paceline.kernels.custom_op import scratch_bytes
from paceline.kernels.moe_route import Routing
from paceline.layers.sampling.table import SamplingTable

ROWS, VOCAB = 3, 5000
Launch = Callable[[], None]


class Factories(TorchDispatchMode):
    """Bytes of the tensors that are made empty or zero."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::empty", "aten::zeros", "aten::empty_like"):
            self.total += result.nbytes
        return result


def of_greedy() -> tuple[int, Launch]:
    from paceline.kernels._triton.greedy import launch_greedy

    args = (torch.randn(ROWS, VOCAB), torch.zeros(ROWS).long(), torch.zeros(ROWS).bool())
    return scratch_bytes(greedy._GREEDY, args), lambda: launch_greedy(*args)


def of_draft_topk() -> tuple[int, Launch]:
    from paceline.kernels._triton.draft_topk import launch_draft_topk

    logits = torch.randn(ROWS, VOCAB)
    out = draft_topk.TopDrafts(torch.zeros(ROWS, 4).long(), torch.zeros(ROWS, 4))
    args = (logits, None, None, None, None, *out)
    launch = lambda: launch_draft_topk(logits, out, noise=None, d2t=None)  # noqa: E731
    return scratch_bytes(draft_topk._DRAFT_TOPK, args), launch


def sampled() -> tuple[Tensor, SamplingTable, edit_logits.SampledRows]:
    table = SamplingTable(ROWS + 1, torch.device("cpu"))
    rows, positions = torch.arange(1, ROWS + 1), torch.ones(ROWS).long()
    history = torch.zeros(ROWS + 1, 8, dtype=torch.int32)
    at = edit_logits.SampledRows(rows, positions, history, None)
    return torch.randn(ROWS, VOCAB), table, at


def of_edit_logits() -> tuple[int, Launch]:
    from paceline.kernels._triton.edit_logits import zero_counts

    logits, table, at = sampled()
    size = scratch_bytes(edit_logits._EDIT_LOGITS, (logits, *at, *table.edits))
    return size, lambda: zero_counts(logits)


def of_draw() -> tuple[int, Launch]:
    from paceline.kernels._triton.draw import launch_draw

    logits, table, at = sampled()
    out = (torch.zeros(ROWS).long(), torch.zeros(ROWS).bool())
    args = (logits, *at, *table.laws, *table.edits, *out)
    size = scratch_bytes(draw._DRAW, args)
    return size, lambda: launch_draw(logits, at, table.laws, table.edits, *out)


def of_moe_experts() -> tuple[int, Launch]:
    from paceline.kernels._triton.moe_experts import launch_moe_experts

    x, hidden, inter, experts = torch.randn(5, 32), 32, 48, 4
    routing = Routing(torch.rand(5, 2), torch.arange(10, dtype=torch.int32).view(5, 2) % experts)
    gate_up, down = torch.randn(experts, 2 * inter, hidden), torch.randn(experts, hidden, inter)
    weights = moe_experts.ExpertWeights(gate_up, None, down, None)
    gate, out = moe_experts.SwiGLU(1.0, None, 0.0), torch.empty_like(x)
    size = scratch_bytes(moe_experts._MOE_EXPERTS, (x, *routing, *weights, *gate, out))
    return size, lambda: launch_moe_experts(x, routing, weights, gate=gate, out=out)


@pytest.mark.parametrize(
    "case", [of_greedy, of_draft_topk, of_edit_logits, of_draw, of_moe_experts]
)
def test_scratch_is_what_the_launcher_allocates(case: Callable[[], tuple[int, Launch]]) -> None:
    size, launch = case()
    with Factories() as seen:
        launch()
    assert seen.total == size > 0


def test_an_operation_without_scratch_takes_none() -> None:
    assert scratch_bytes(torch.ops.aten.add.Tensor, (1, 2)) == 0
