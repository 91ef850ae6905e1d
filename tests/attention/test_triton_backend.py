"""The triton backend: what it tells its kernels.  What they answer is in the matrix."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from paceline.attention.backends import triton_backend
from paceline.attention.backends.triton_backend import TritonBackend, TritonBuffers, TritonPlan
from paceline.attention.contract import AttentionSpec, LayerCache, Part
from paceline.attention.layouts.page_table import PageTablePlan
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import PagedCall, SharingRule, SplitWorkspace, split_workspace

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


def layer_of(group: int, *, v_in_k: bool = False) -> LayerCache:
    spec = AttentionSpec(
        layer_id=0,
        group=group,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        v_head_dim=16 if v_in_k else 64,
        scale=0.5,
        window=None,
        soft_cap=None,
        v_in_k=v_in_k,
    )
    cache = torch.zeros(2, 16, 1, 64)
    sides = {"k_cache": cache, "v_cache": cache[..., : spec.v_head_dim]}
    return LayerCache(spec=spec, **sides, k_scale=None, v_scale=None, sinks=None)


@pytest.mark.parametrize("v_in_k", [False, True])
def test_a_decode_is_told_what_its_group_shares(
    v_in_k: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents are read by the kernel of every other step, which is told nothing of it."""
    told: list[tuple[object, ...]] = []
    for kernel in ("paged_decode", "paged_extend"):
        monkeypatch.setattr(triton_backend, kernel, lambda _, *given: told.append(given))
    made = plan()
    step = replace(made, table=replace(made.table, max_extend_len=1), shared=("of 0", "of 1"))
    q = torch.zeros(1, 2, 64)
    TritonBackend().forward(q, q, q, layer_of(1, v_in_k=v_in_k), step, Part.ALL)
    assert told == [(step.workspace,) if v_in_k else (step.workspace, "of 1")]


def test_a_step_alone_is_attended_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(triton_backend, "attend_step", lambda *_, **how: told.append(how))
    q = torch.zeros(EXTEND, 2, 64)
    TritonBackend().forward(q, q, q, layer_of(1), plan(), Part.STEP)
    assert told == [{"by_triton": True}]


@pytest.mark.parametrize(("reqs", "is_told"), [(3, False), (4, True), (5, True)])
@pytest.mark.parametrize("shares_prefix", [False, True])
def test_what_is_shared_is_looked_for_in_the_groups_that_have_a_rule(
    reqs: int, is_told: bool, shares_prefix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[object, ...]] = []
    rule = SharingRule(min_pages=2, min_reqs=4, tile_reqs=8)
    found = SimpleNamespace(of=lambda reqs: f"of {reqs}")
    monkeypatch.setattr(
        triton_backend, "find_shared", lambda *given, page_size: told.append((*given, page_size))
    )
    monkeypatch.setattr(triton_backend, "page_table_plan", lambda view: None)
    view = SimpleNamespace(
        shares_prefix=shares_prefix,
        padded_reqs=reqs,
        padded_tokens=reqs + 9,
        kv_lens="kv lens",
        prefix_lens="prefix lens",
        groups=[SimpleNamespace(page_table=f"table {group}") for group in range(3)],
    )
    buffers = TritonBuffers(
        workspace=plan().workspace,
        rules=(None, rule, rule),
        shared=(found, found, None),
        page_size=16,
    )
    made = TritonBackend().plan(view, buffers)
    if shares_prefix and is_told:
        assert told == [("table 1", "kv lens", f"of {reqs}", rule, 16)]
        assert made.shared == (None, f"of {reqs}", None)
    else:
        assert told == []
        assert made.shared == (None, None, None)
