"""The triton backend: what it tells its kernels.  What they answer is in the matrix."""

import pytest
import torch

from paceline.attention.backends import triton_backend
from paceline.attention.backends.triton_backend import TritonBackend, TritonPlan
from paceline.attention.contract import AttentionSpec, LayerCache, Part
from paceline.attention.layouts.page_table import PageTablePlan
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import PagedCall, SplitWorkspace, split_workspace

EXTEND = 17


def plan() -> TritonPlan:
    """One request that extends by EXTEND behind a prefix of 2, in two cache groups."""
    lens = torch.tensor([2], dtype=torch.int32)
    table = PageTablePlan(
        cu_seqlens_q=torch.tensor([0, EXTEND], dtype=torch.int32),
        prefix_lens=lens,
        extend_lens=lens * 0 + EXTEND,
        kv_lens=lens + EXTEND,
        page_tables=(torch.ones(1, 2, dtype=torch.int32), torch.ones(1, 3, dtype=torch.int32)),
        tree_mask=None,
        mask=MaskKind.CAUSAL,
        max_extend_len=EXTEND,
        kv_len_bound=64,
    )
    workspace = split_workspace(1, [(2, 1)], v_head_dim=64, device=torch.device("cpu"))
    return TritonPlan(table=table, workspace=workspace, shared=(None,))


@pytest.mark.parametrize("part", [Part.ALL, Part.PREFIX])
def test_an_extend_is_told_its_bound_its_group_and_its_scales(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is the kernel's grid: one short, and the last rows of a tile are never written."""
    told: list[tuple[PagedCall, SplitWorkspace]] = []
    monkeypatch.setattr(triton_backend, "paged_extend", lambda *given: told.append(given))
    spec = AttentionSpec(
        layer_id=0,
        group=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        v_head_dim=64,
        scale=0.5,
        window=9,
        soft_cap=30.0,
    )
    cache = torch.zeros(2, 16, 1, 64)
    k_scale, v_scale, sinks = torch.ones(1), torch.ones(1) * 2, torch.zeros(2)
    layer = LayerCache(
        spec=spec, k_cache=cache, v_cache=cache, k_scale=k_scale, v_scale=v_scale, sinks=sinks
    )
    q, step = torch.zeros(EXTEND, 2, 64), plan()
    TritonBackend().forward(q, q, q, layer, step, part)
    [(call, workspace)] = told
    table = step.table
    assert workspace is step.workspace
    assert (call.q, call.cache) == (q, (cache, cache, k_scale, v_scale, None))
    lens = (table.prefix_lens, table.kv_lens, table.cu_seqlens_q)
    wanted = (table.page_tables[1], *lens, EXTEND, None, MaskKind.CAUSAL, None)
    assert all(one is other for one, other in zip(call.rows, wanted, strict=True))
    is_prefix = part is Part.PREFIX
    assert call.weighing == (0.5, 9, 30.0, is_prefix, None if is_prefix else sinks, None)
