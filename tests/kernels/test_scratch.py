"""What an operation says its GPU kernel takes is what the launcher holds at most."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.parallel import whole
from paceline.kernels import draft_topk, draw, edit_logits, greedy, moe_experts
from paceline.kernels.custom_op import scratch_sizes
from paceline.kernels.moe_route import Routing
from paceline.layers.sampling.table import SamplingTable

ROWS, VOCAB = 3, 5000
Launch = Callable[[], None]
Sizes = tuple[int, ...]


class Factories(TorchDispatchMode):
    """Sizes of the tensors that are made empty or zero: those alive when most bytes are."""

    def __init__(self) -> None:
        super().__init__()
        self.most: list[int] = []
        self._alive: dict[int, int] = {}  # in the order of allocation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::empty", "aten::zeros", "aten::empty_like"):
            gc.collect()  # the interpreter leaves arguments in cycles
            storage = result.untyped_storage()
            self._alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, storage._cdata)
            self.most = max(self.most, list(self._alive.values()), key=sum)
        return result


def of_greedy() -> tuple[Sizes, Launch]:
    from paceline.kernels._triton.greedy import launch_greedy

    logits, *out = torch.randn(ROWS, VOCAB), torch.zeros(ROWS).long(), torch.zeros(ROWS).bool()
    sizes = scratch_sizes(greedy._GREEDY, (logits, None, *out))
    return sizes, lambda: launch_greedy(logits, *out)


def of_draft_topk() -> tuple[Sizes, Launch]:
    from paceline.kernels._triton.draft_topk import launch_draft_topk

    logits = torch.randn(ROWS, VOCAB)
    out = draft_topk.TopDrafts(torch.zeros(ROWS, 4).long(), torch.zeros(ROWS, 4))
    args = (logits, None, None, None, None, *out)
    launch = lambda: launch_draft_topk(logits, out, noise=None, d2t=None)  # noqa: E731
    return scratch_sizes(draft_topk._DRAFT_TOPK, args), launch


def sampled() -> tuple[Tensor, SamplingTable, edit_logits.SampledRows]:
    table = SamplingTable(ROWS + 1, torch.device("cpu"))
    rows, positions = torch.arange(1, ROWS + 1), torch.ones(ROWS).long()
    history = torch.zeros(ROWS + 1, 8, dtype=torch.int32)
    at = edit_logits.SampledRows(rows, positions, history, None)
    return torch.randn(ROWS, VOCAB), table, at


def of_edit_logits() -> tuple[Sizes, Launch]:
    from paceline.kernels._triton.edit_logits import zero_counts

    logits, table, at = sampled()
    sizes = scratch_sizes(edit_logits._EDIT_LOGITS, (logits, *at, *table.edits))
    return sizes, lambda: zero_counts(logits)


def of_draw() -> tuple[Sizes, Launch]:
    from paceline.kernels._triton.draw import launch_draw

    logits, table, at = sampled()
    out = (torch.zeros(ROWS).long(), torch.zeros(ROWS).bool())
    args = (logits, *at, *table.laws, *table.edits, None, *out)
    sizes = scratch_sizes(draw._DRAW, args)
    return sizes, lambda: launch_draw(logits, at, table.laws, table.edits, *out)


def of_moe_experts() -> tuple[Sizes, Launch]:
    from paceline.kernels._triton.moe_experts import launch_moe_experts

    x, hidden, inter, experts = torch.randn(5, 32), 32, 48, 4
    routing = Routing(torch.rand(5, 2), torch.arange(10, dtype=torch.int32).view(5, 2) % experts)
    gate_up, down = torch.randn(experts, 2 * inter, hidden), torch.randn(experts, hidden, inter)
    weights = moe_experts.ExpertWeights(gate_up, None, down, None)
    gate, out = moe_experts.SwiGLU(1.0, None, 0.0), torch.empty_like(x)
    args = (x, *routing, *weights, *gate, 0, experts, None, out)
    sizes, held = scratch_sizes(moe_experts._MOE_EXPERTS, args), whole(experts)
    return sizes, lambda: launch_moe_experts(
        x, routing, weights, gate=gate, experts=held, plus=None, out=out
    )


@pytest.mark.parametrize(
    "case", [of_greedy, of_draft_topk, of_edit_logits, of_draw, of_moe_experts]
)
def test_scratch_is_what_the_launcher_allocates(case: Callable[[], tuple[Sizes, Launch]]) -> None:
    sizes, launch = case()
    gc.freeze()  # a collection for each tensor looks at what the launch made alone
    with Factories() as seen:
        launch()
    assert tuple(seen.most) == sizes != ()


def test_an_operation_without_scratch_takes_none() -> None:
    assert scratch_sizes(torch.ops.aten.add.Tensor, (1, 2)) == ()
