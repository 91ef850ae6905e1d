"""Cascade on a GPU: compiled prefix, tree and merge kernels against the definition in float64."""

import pytest
import torch
from paged_cases import BatchSpec, PagedCase, Shape, make_case, reference, worst_error
from torch import Tensor

from paceline.attention.backends.triton_backend import TritonBackend
from paceline.attention.cascade import cascade
from paceline.attention.contract import AttentionSpec, LayerCache, Limits, Part
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention.reference import gather_pages
from paceline.kernels.step_view import GroupView, StepView

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


def fresh_rows(case: PagedCase) -> tuple[Tensor, Tensor]:
    """The step's own k and v, [tokens, kv_heads, *], slices of one projection."""
    made = []
    for cache in (case.k_cache, case.v_cache):
        rows = []
        for request, (prefix, total) in enumerate(
            zip(case.prefix_lens.tolist(), case.kv_lens.tolist(), strict=True)
        ):
            rows.append(gather_pages(cache, case.page_table[request], total)[prefix:])
        made.append(torch.cat(rows))
    k, v = made
    fused = torch.cat((k.flatten(1), v.flatten(1)), 1)
    return fused[:, : k[0].numel()].view_as(k), fused[:, k[0].numel() :].view_as(v)


def view_of(case: PagedCase) -> StepView:
    """What attention reads of a step."""
    tokens, extend = case.q.shape[0], int(case.extend_lens.max())
    places = torch.zeros(tokens, dtype=torch.int64, device=case.q.device)
    rows = torch.zeros(case.prefix_lens.shape[0], dtype=torch.int64, device=case.q.device)
    return StepView(
        row_ids=rows,
        prefix_lens=case.prefix_lens,
        extend_lens=case.extend_lens,
        kv_lens=case.kv_lens,
        cu_seqlens_q=case.cu_seqlens_q,
        req_ids=places,
        positions=places,
        input_ids=places,
        logits_loc=rows,
        groups=(GroupView(page_table=case.page_table, out_cache_loc=places),),
        mask=case.mask,
        tree_mask=case.tree_mask,
        max_extend_len=extend,
        kv_len_bound=int(case.kv_lens.max()),
    )


def spec_of(case: PagedCase) -> AttentionSpec:
    shape = case.shape
    return AttentionSpec(
        layer_id=0,
        group=0,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        scale=case.scale,
        window=shape.window,
        soft_cap=shape.soft_cap,
    )


def layer_of(case: PagedCase) -> LayerCache:
    return LayerCache(
        spec=spec_of(case),
        k_cache=case.k_cache,
        v_cache=case.v_cache,
        k_scale=None,
        v_scale=None,
        sinks=case.sinks,
    )


def limits_of(case: PagedCase) -> Limits:
    shape = case.shape
    return Limits(
        device=case.q.device,
        dtype=shape.dtype,
        kv_dtype=shape.dtype,
        layers=(spec_of(case),),
        max_reqs=case.prefix_lens.shape[0],
        max_tokens=case.q.shape[0],
        max_pages=(case.page_table.shape[1],),
        windows=(shape.window,),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        page_size=shape.page_size,
    )


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
    plan = backend.plan(view_of(case), backend.make_buffers(limits_of(case)))
    k, v = fresh_rows(case)
    out, lse = backend.forward(case.q, k, v, layer_of(case), plan, Part.ALL)
    assert worst_error(case, out) <= limit(case)
    assert lse is not None
    torch.testing.assert_close(lse, reference(case)[1], rtol=1e-4, atol=1e-4)


def test_a_replay_follows_another_tree() -> None:
    """The same keys under the trees of another seed."""
    shape = SHAPES["gqa"]
    case = make_case(VERIFY, shape, seed=7, device="cuda", mask=MaskKind.TREE)
    other = make_case(VERIFY, shape, seed=8, device="cuda", mask=MaskKind.TREE)
    assert case.tree_mask is not None
    assert other.tree_mask is not None
    assert not torch.equal(case.tree_mask, other.tree_mask)
    backend = cascade(TritonBackend())
    buffers = backend.make_buffers(limits_of(case))
    view, layer, (k, v) = view_of(case), layer_of(case), fresh_rows(case)

    def step() -> Tensor:
        return backend.forward(case.q, k, v, layer, backend.plan(view, buffers), Part.ALL)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    assert worst_error(case, out) <= limit(case)
    case.tree_mask.copy_(other.tree_mask)
    assert worst_error(case, out) > limit(case)
    graph.replay()
    assert worst_error(case, out) <= limit(case)
