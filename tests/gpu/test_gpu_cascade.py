"""Cascade on a GPU: compiled prefix, tree and merge kernels against the definition in float64."""

from dataclasses import replace

import pytest
import torch
from paged_cases import BatchSpec, PagedCase, Shape, make_case, reference, worst_error
from torch import Tensor

from paceline.attention.backends.triton_backend import TritonBackend
from paceline.attention.cascade import cascade
from paceline.attention.contract import Part
from paceline.core.modes import MaskKind

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

VERIFY = BatchSpec(prefix_lens=(200, 3, 0, 77), extend_lens=(4, 4, 4, 4))
WIDE = BatchSpec(prefix_lens=(0, 1000, 16), extend_lens=(64, 64, 64))
ONE_MORE = BatchSpec(prefix_lens=(33, 15), extend_lens=(65, 65))
B, H, F = torch.bfloat16, torch.float16, torch.float32
SHAPES = {
    "gqa": Shape(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, dtype=B),
    "mha-capped": Shape(num_heads=8, num_kv_heads=8, soft_cap=3.0, dtype=H),
    "mqa-sinks": Shape(num_heads=71, num_kv_heads=1, sinks=True, dtype=B),
    "wide-head": Shape(num_heads=16, num_kv_heads=8, head_dim=256, v_head_dim=256, dtype=B),
    "float32": Shape(num_heads=8, num_kv_heads=2, head_dim=80, v_head_dim=80, page_size=7),
    "value-dim": Shape(num_heads=16, num_kv_heads=4, head_dim=128, sinks=True, dtype=B),
    "window": Shape(num_heads=8, num_kv_heads=2, window=20, sinks=True, dtype=B),
}


def limit(case: PagedCase) -> float:
    """In units of worst_error: float32 gets eight, for the hardware's approximate exp2; others two,
    for a prefix that is rounded to the model's dtype before it is merged."""
    return 8.0 if case.shape.dtype == F else 2.0


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("batch", [VERIFY, WIDE, ONE_MORE], ids=["verify", "wide", "65"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_in_three_parts_is_the_whole(name: str, batch: BatchSpec) -> None:
    case = make_case(batch, SHAPES[name], seed=7, device="cuda", mask=MaskKind.TREE)
    backend = cascade(TritonBackend())
    plan = backend.plan(case.view(), backend.make_buffers(case.limits))
    out, lse = backend.forward(case.q, *case.fresh_rows(), case.layer, plan, Part.ALL)
    assert worst_error(case, out) <= limit(case)
    assert lse is not None
    torch.testing.assert_close(lse, reference(case)[1], rtol=1e-4, atol=1e-4)


def test_a_replay_follows_another_tree() -> None:
    """The same keys under the trees of another seed."""
    shape = SHAPES["gqa"]
    case = make_case(VERIFY, shape, seed=7, device="cuda", mask=MaskKind.TREE)
    other = make_case(VERIFY, shape, seed=8, device="cuda", mask=MaskKind.TREE)
    then = replace(case, tree_mask=other.tree_mask)
    backend = cascade(TritonBackend())
    buffers = backend.make_buffers(case.limits)
    view, layer, (k, v) = case.view(), case.layer, case.fresh_rows()
    assert view.tree_mask is not None

    def step() -> Tensor:
        return backend.forward(case.q, k, v, layer, backend.plan(view, buffers), Part.ALL)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    assert worst_error(case, out) <= limit(case)
    view.tree_mask.copy_(then.view().tree_mask)
    assert worst_error(then, out) > limit(case)
    graph.replay()
    assert worst_error(then, out) <= limit(case)
