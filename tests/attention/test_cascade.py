"""A backend without trees under cascade equals a walk over the keys in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Built, Case, build, walk
from attention_runs import TOLERANCE, assert_is_the_walk, difference, limits, run
from composed_cases import Listener, NoTree, facts, heard_by, hooks, listener
from torch import Tensor

from paceline.attention import cascade as cascade_module
from paceline.attention.cascade import CascadePlan, cascade
from paceline.attention.contract import AttentionConfig, GraphSupport, Part
from paceline.attention.layouts.page_table import page_table_plan
from paceline.attention.paged import attend_cpu, paged_call
from paceline.core.errors import ConfigError
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout
from paceline.kernels.paged_attention import paged_extend
from paceline.runner.recording.recorded import RecordedGraph

TREE = Case(mask=MaskKind.TREE, extend_lens=(5, 5, 5))
WANTED = AttentionConfig(
    device_type="cpu",
    cuda_arch=None,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    page_size=16,
    heads=(Heads(4, 2, 64, 64),),
    window=True,
    soft_cap=True,
    sinks=True,
    masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
    needs_lse=False,
    graph=GraphSupport.ALWAYS,
)
STEP = Step(
    epoch=1,
    layout=StepLayout(rows=(1,), extend_lens=(1,), emits=(True,)),
    is_ragged=False,
    prefix_lens_bound=(3,),
    sampler=SamplerTier.GREEDY,
    logprobs=False,
    deltas=(),
)


def check(case: Case) -> None:
    """Every part against the walk.  Where a prefix is empty its rows are as they were allocated."""
    for part in list(Part) if any(case.prefix_lens) else [Part.ALL]:
        built = build(replace(case, part=part))
        out, lse = run(cascade(NoTree()), built)
        assert lse is not None
        seen = lse.isfinite().unsqueeze(2)
        out = torch.where(seen, out, walk(built)[0])
        assert_is_the_walk(built, out, lse, tolerance=TOLERANCE[case.dtype])


CASES = {
    "plain": TREE,
    "page-1": replace(TREE, page_size=1, prefix_lens=(0, 1, 18)),
    "page-16": replace(TREE, page_size=16, prefix_lens=(16, 15, 17)),
    "no-prefix": replace(TREE, prefix_lens=(0, 0, 0)),
    "capped": replace(TREE, soft_cap=0.5),
    "sinks": replace(TREE, has_sinks=True),
    "sinks-capped-mqa": replace(TREE, has_sinks=True, soft_cap=0.5, heads=6, kv_heads=1),
    "value-dim": replace(TREE, v_head_dim=5, heads=3, kv_heads=3),
    "bf16": replace(TREE, dtype=torch.bfloat16),
    "fp16-sinks": replace(TREE, dtype=torch.float16, has_sinks=True),
    "window-2": replace(TREE, window=2),
    "window-4-sinks": replace(TREE, window=4, has_sinks=True, soft_cap=0.5),
    "wide-window": replace(TREE, window=40, page_size=16),
}


@pytest.mark.parametrize("name", CASES)
def test_every_node_sees_its_prefix_and_its_ancestors(name: str) -> None:
    check(CASES[name])


def test_a_tree_asks_the_inner_backend_for_the_prefix_alone() -> None:
    inner = NoTree()
    backend = cascade(inner)
    run(backend, build(TREE))
    assert inner.parts == [Part.PREFIX]
    run(backend, build(replace(TREE, window=3)))
    assert inner.parts == [Part.PREFIX]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_step_without_a_tree_is_the_inner_backend_alone(sinks: bool, window: int | None) -> None:
    built = build(Case(window=window, has_sinks=sinks))
    inner = NoTree()
    out, _ = run(cascade(inner), built)
    assert inner.parts == [Part.ALL]
    alone, _ = run(NoTree(), built)
    assert torch.equal(out, alone)


@pytest.mark.parametrize("window", [None, 3])
def test_padded_rows_do_not_change_live_rows(window: int | None) -> None:
    """Padded rows read page 0, which holds NaN here; nobody sees what they get."""
    case = replace(TREE, window=window)
    alone, _ = run(cascade(NoTree()), build(case))
    padded, _ = run(cascade(NoTree()), build(replace(case, padded_reqs=3)))
    assert torch.equal(alone, padded)


@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("part", [Part.ALL, Part.PREFIX], ids=lambda part: part.value)
def test_the_triton_path_of_windowed_layers_means_the_same(part: Part, window: int) -> None:
    case = replace(TREE, window=window, has_sinks=True, part=part, head_dim=16, v_head_dim=16)
    built = build(replace(case, soft_cap=0.5))
    call = paged_call(built.q, built.layer, page_table_plan(built.view), part)
    paged_extend(call)
    out, lse = call.out, call.lse
    expected, expected_lse = walk(built)
    assert difference(out.double(), expected) < TOLERANCE[torch.float32]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0.0, atol=1e-4)


def test_a_windowed_layer_reads_the_pages_of_its_own_group() -> None:
    built = build(replace(TREE, window=2))
    layer = replace(built.layer, spec=replace(built.layer.spec, group=1))
    [pages] = page_table_plan(built.view).page_tables
    table = replace(page_table_plan(built.view), page_tables=(torch.zeros_like(pages), pages))
    out, _ = attend_cpu(built.q, layer, table, Part.ALL, wants_lse=True)
    assert difference(out.double(), walk(built)[0]) < TOLERANCE[torch.float32]
    rows = paged_call(built.q, layer, table, Part.ALL).rows
    assert rows.page_table is pages
    assert rows.max_extend_len == 5  # the grid: a row short, and a tile's last is not written


def test_elsewhere_than_on_a_cpu_a_windowed_tree_takes_the_triton_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, told = build(replace(TREE, window=2)), []
    monkeypatch.setattr(cascade_module, "paged_extend", told.append)
    table = page_table_plan(built.view)
    found = cascade_module._windowed_tree(built.q.to("meta"), built.layer, table, Part.ALL)
    [call] = told
    assert (call.out, call.lse) == found


def test_a_replay_follows_another_tree_and_other_lengths() -> None:
    """The graph is recorded over one step and replayed over another: there the tree is a chain."""
    first = build(TREE)
    second = build(replace(TREE, prefix_lens=(4, 18, 2)), seed=1)
    backend = cascade(NoTree())
    buffers = backend.make_buffers(limits(first))
    k, v = first.paged.fresh_rows()
    results: list[Tensor] = []

    def step() -> None:
        plan = backend.plan(first.view, buffers)
        results[:] = [backend.forward(first.q, k, v, first.layer, plan, Part.ALL)[0]]

    graph = RecordedGraph(poison=True)
    graph.capture(step)
    graph.replay()
    assert difference(results[0].double(), walk(first)[0]) < TOLERANCE[torch.float32]
    _overwrite(first, second, k, v)
    assert first.view.tree_mask is not None
    first.view.tree_mask.copy_(torch.ones(5, 5).tril().bool().repeat(3, 1))
    graph.replay()
    chain = walk(second, replace(second.case, mask=MaskKind.CAUSAL))[0]
    assert difference(results[0].double(), chain) < TOLERANCE[torch.float32]
    assert difference(walk(second)[0], chain) > 1.0


def _overwrite(built: Built, other: Built, k: Tensor, v: Tensor) -> None:
    """The data of `other` in the tensors of `built`."""
    pages = built.layer.k_cache.shape[0]
    assert pages == other.layer.k_cache.shape[0]
    for mine, theirs in zip((k, v), other.paged.fresh_rows(), strict=True):
        mine.copy_(theirs)
    built.q.copy_(other.q)
    built.layer.k_cache.copy_(other.layer.k_cache)
    built.layer.v_cache.copy_(other.layer.v_cache)
    for field in ("prefix_lens", "extend_lens", "kv_lens", "cu_seqlens_q"):
        getattr(built.view, field).copy_(getattr(other.view, field))
    built.view.groups[0].page_table.copy_(other.view.groups[0].page_table)


# --- the composition as a backend -----------------------------------------------------------------

CAUSAL_VIEW = build(Case()).view
Call = Callable[[Any], tuple[object, tuple[object, ...]]]
CALLS: dict[str, Call] = {  # hook -> what it returned, and what the inner backend must have heard
    "unsupported_reasons": lambda backend: (
        backend.unsupported_reasons(replace(WANTED, masks=frozenset({MaskKind.CAUSAL}))),
        (replace(WANTED, masks=frozenset({MaskKind.CAUSAL})),),
    ),
    "make_buffers": lambda backend: (backend.make_buffers("limits"), ("limits",)),
    "buffer_bytes": lambda backend: (backend.buffer_bytes("limits"), ("limits",)),
    "plan": lambda backend: (backend.plan(CAUSAL_VIEW, "b").inner, (CAUSAL_VIEW, "b")),
    "host_plan": lambda backend: (backend.host_plan(STEP, "b"), (STEP, "b")),
    "forward": lambda backend: (
        backend.forward("q", "k", "v", "layer", CascadePlan(inner="p", tree=None), Part.ALL),
        ("q", "k", "v", "layer", "p", Part.ALL),
    ),
}


@pytest.mark.parametrize("name", hooks())
def test_every_hook_is_forwarded(name: str) -> None:
    """A hook the contract gains later has no row here and fails."""
    inner, control = listener("inner"), listener("inner")
    _, expected = CALLS[name](cascade(inner()))
    assert heard_by(inner, name) == [expected]
    assert CALLS[name](cascade(inner()))[0] == getattr(control(), name)(*expected)


def test_what_it_can_do_is_what_the_inner_backend_can_and_trees() -> None:
    made = cascade(Listener())
    can, inner = made.capabilities, Listener.capabilities
    assert can.masks == {MaskKind.CAUSAL, MaskKind.TREE}
    assert replace(can, masks=inner.masks) == inner
    assert made.name == "cascade(listener)"


def test_every_fact_of_the_class_is_stated() -> None:
    """A fact the contract gains later is not in the class and fails."""
    inner = type("Keeping", (NoTree,), {"kept_fields": frozenset({"counter"})})
    assert facts() <= vars(cascade(inner())).keys()
    assert cascade(inner()).kept_fields == {"counter"}


def test_trees_ask_the_inner_backend_for_an_lse_and_no_tree() -> None:
    inner = listener("inner")
    assert cascade(inner()).unsupported_reasons(WANTED) == ["inner is busy"]
    asked = replace(WANTED, masks=frozenset({MaskKind.CAUSAL}), needs_lse=True)
    assert heard_by(inner, "unsupported_reasons") == [(asked,)]


def test_a_quantised_cache_is_refused_for_trees_alone() -> None:
    fp8 = replace(WANTED, kv_dtype=torch.float8_e4m3fn)
    assert cascade(NoTree()).unsupported_reasons(fp8) == [
        "KV dtype must be torch.float32 under a cascade, got torch.float8_e4m3fn: a tree's new "
        "keys would be read as computed, not as the cache rounds them"
    ]
    chains = replace(fp8, masks=frozenset({MaskKind.CAUSAL}))
    assert cascade(NoTree()).unsupported_reasons(chains) == []
    assert cascade(NoTree()).unsupported_reasons(WANTED) == []


def test_a_gpu_without_triton_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reasons = cascade(NoTree()).unsupported_reasons(replace(WANTED, device_type="cuda"))
    assert "triton must be installed for a cascade's tree part, got no such package" in reasons


def test_a_backend_without_an_lse_cannot_be_under_a_cascade() -> None:
    mute = type(
        "Mute", (NoTree,), {"capabilities": replace(NoTree.capabilities, returns_lse=False)}
    )
    with pytest.raises(ConfigError) as caught:
        cascade(mute())
    assert str(caught.value) == (
        "attention backend under a cascade must be one that returns a log-sum-exp, got no-tree; "
        "choose a backend with a tree mask, or add returns_lse to this one"
    )
