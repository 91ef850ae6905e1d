"""FlashAttention 3 and 4 by their emulator equal the walk in float64, and refuse with reasons."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_cases import Built, Case, build
from attention_runs import TOLERANCE, assert_is_the_walk, limits, run
from torch import Tensor

from covers import Cell, cell_name, pairwise
from paceline.attention.backends.fa3_backend import FlashAttention3Backend
from paceline.attention.backends.fa4_backend import FlashAttention4Backend
from paceline.attention.cascade import cascade
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    GraphSupport,
    Part,
)
from paceline.core.errors import ConfigError, KernelArgumentError
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.proof.emulators import flash_attn
from paceline.runner.recording.recorded import RecordedGraph

BOTH = [FlashAttention4Backend, FlashAttention3Backend]
either = pytest.mark.parametrize("backend_class", BOTH, ids=["fa4", "fa3"])
IN_BF16 = Case(dtype=torch.bfloat16)
PREFIX_ALONE = replace(IN_BF16, part=Part.PREFIX)
H200 = AttentionConfig(
    device_type="cuda",
    cuda_arch=(9, 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=16,
    heads=(Heads(32, 8, 128, 128),),
    window=True,
    soft_cap=True,
    sinks=False,
    masks=frozenset({MaskKind.CAUSAL}),
    needs_lse=True,
    graph=GraphSupport.ALWAYS,
)


def built_finite(case: Case) -> Built:
    """The case in a pool whose dead slots are large and finite: the kernels load them."""
    built = build(case)
    for cache in (built.layer.k_cache, built.layer.v_cache):
        cache.nan_to_num_(nan=500.0)
    return built


def check(backend: AttentionBackend, case: Case) -> None:
    """The backend against the walk."""
    built = built_finite(case)
    out, lse = run(backend, built)
    assert lse is None or lse.is_contiguous()
    assert_is_the_walk(built, out, lse, tolerance=TOLERANCE[case.dtype])


AXES: dict[str, tuple[Any, ...]] = {
    "backend": tuple(BOTH),
    "page_size": (1, 3, 16),
    "soft_cap": (None, 0.5),
    "extend_lens": ((1, 1, 1), (1, 2, 5), (5, 5, 5)),
    "heads": ((3, 3), (14, 2), (6, 1)),
    "dtype": (torch.float16, torch.bfloat16),
}
WINDOWS = {"window": (None, 1, 3, 6)}
FROZEN: dict[str, tuple[Any, ...]] = {
    "backend": tuple(BOTH),
    "page_size": (1, 3, 16),
    "extend_and_window": ((1, 2), (1, 6), (3, 4), (3, 9), (5, 40)),
}


def case_of(cell: Cell, **fixed: Any) -> Case:
    """The step of a cell."""
    chosen = {name: value for name, value in cell.items() if name not in ("backend", "heads")}
    heads, kv_heads = cell["heads"]
    return Case(heads=heads, kv_heads=kv_heads, **chosen, **fixed)


@pytest.mark.parametrize("cell", pairwise(AXES | WINDOWS), ids=cell_name)
def test_a_chain_of_any_kind_equals_the_walk(cell: Cell) -> None:
    check(cell["backend"](flash_attn), case_of(cell))


@pytest.mark.parametrize("cell", pairwise(AXES), ids=cell_name)
def test_the_prefix_alone_with_its_lse(cell: Cell) -> None:
    """A request without a prefix gives 0 and −inf: nothing to merge."""
    case = case_of(cell, part=Part.PREFIX)
    check(cell["backend"](flash_attn), case)
    out, lse = run(cell["backend"](flash_attn), built_finite(case))
    assert lse is not None
    assert not out[: case.extend_lens[0]].any()
    assert (lse[: case.extend_lens[0]] == float("-inf")).all()


@either
@pytest.mark.parametrize("case", [IN_BF16, PREFIX_ALONE], ids=["all", "prefix"])
def test_a_padded_row_of_a_ragged_step_brings_no_query(case: Case, backend_class: type) -> None:
    check(backend_class(flash_attn), replace(case, prefix_lens=(4, 1, 9), extend_lens=(2, 0, 5)))


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_count_in_the_whole_and_not_in_the_prefix(window: int | None) -> None:
    check(FlashAttention4Backend(flash_attn), replace(IN_BF16, has_sinks=True, window=window))
    check(FlashAttention4Backend(flash_attn), replace(PREFIX_ALONE, has_sinks=True))


@either
@pytest.mark.parametrize("window", [None, 3])
def test_a_tree_by_cascade(window: int | None, backend_class: type) -> None:
    case = replace(IN_BF16, mask=MaskKind.TREE, extend_lens=(5, 5, 5), window=window)
    check(cascade(backend_class(flash_attn)), case)


@pytest.mark.parametrize("cell", pairwise(FROZEN), ids=cell_name)
def test_a_windowed_prefix_of_uniform_rows(cell: Cell) -> None:
    """Frozen KV: the window counts from the query, which lies behind the keys."""
    extend, window = cell["extend_and_window"]
    case = replace(PREFIX_ALONE, page_size=cell["page_size"], window=window)
    check(cell["backend"](flash_attn), replace(case, extend_lens=(extend,) * 3))


@pytest.mark.parametrize(
    ("case", "got"),
    [
        (replace(PREFIX_ALONE, window=6), "6, causal mask, 8 rows of 3 requests, at most 5 of one"),
        (
            replace(PREFIX_ALONE, window=2, extend_lens=(2, 2, 2)),
            "2, causal mask, 6 rows of 3 requests, at most 2 of one",
        ),
        (
            replace(PREFIX_ALONE, window=9, extend_lens=(5, 5, 5), mask=MaskKind.TREE),
            "9, tree mask, 15 rows of 3 requests, at most 5 of one",
        ),
    ],
    ids=["ragged", "narrow", "tree"],
)
@either
def test_a_windowed_prefix_the_library_cannot_state_is_refused(
    backend_class: type, case: Case, got: str
) -> None:
    text = (
        "a window where the prefix is attended alone must be wider than a chain's rows, of which "
        f"every request brings as many, got {got}; attend the layer with the triton backend"
    )
    with pytest.raises(KernelArgumentError, match=text):
        run(backend_class(flash_attn), built_finite(case))


@either
@pytest.mark.parametrize("part", Part)
def test_a_recorded_step_follows_lengths_pages_and_prefixes(
    part: Part, backend_class: type
) -> None:
    """Captured with one set of requests, replayed with another on the same storages."""
    backend = backend_class(flash_attn)
    first, then = (
        built_finite(replace(IN_BF16, part=part, prefix_lens=prefixes, extend_lens=(2, 2, 2)))
        for prefixes in ((3, 0, 18), (0, 4, 17))  # pools of the same size
    )
    buffers = backend.make_buffers(limits(first))
    held: list[Tensor | None] = []

    def step() -> None:
        plan = backend.plan(first.view, buffers)
        held.extend(backend.forward(first.q, first.q, first.q, first.layer, plan, part))

    graph = RecordedGraph(poison=True)
    graph.capture(step)
    for name in ("prefix_lens", "kv_lens", "cu_seqlens_q", "req_ids"):
        getattr(first.view, name).copy_(getattr(then.view, name))
    first.view.groups[0].page_table.copy_(then.view.groups[0].page_table)
    first.layer.k_cache.copy_(then.layer.k_cache)
    first.layer.v_cache.copy_(then.layer.v_cache)
    first.q.copy_(then.q)
    graph.replay()
    wanted, wanted_lse = run(backend, then)
    out, lse = held
    assert out is not None
    assert torch.equal(out.double(), wanted)
    assert (lse is None) == (wanted_lse is None) == (part is Part.ALL)
    if lse is not None and wanted_lse is not None:
        assert torch.equal(lse.double(), wanted_lse)


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: what is installed says nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@either
@pytest.mark.usefixtures("for_another_machine")
def test_a_plain_decoder_on_a_hopper_gpu_is_served(backend_class: type[AttentionBackend]) -> None:
    assert backend_class().unsupported_reasons(H200) == []
    other = replace(H200, page_size=1, heads=(Heads(32, 8, 64, 64),), dtype=torch.float16)
    assert backend_class().unsupported_reasons(replace(other, kv_dtype=torch.float16)) == []


@pytest.mark.parametrize(
    ("backend_class", "config", "text"),
    [
        (BOTH[0], replace(H200, cuda_arch=(12, 0)), "CUDA arch must be at most (11, 9) for paged"),
        (BOTH[0], replace(H200, cuda_arch=(8, 9)), "CUDA arch must be at least (9, 0)"),
        (
            BOTH[0],
            replace(H200, heads=(Heads(32, 8, 256, 256),)),
            "head dim must be [64, 80, 96, 128]",
        ),
        (
            BOTH[0],
            replace(H200, heads=(Heads(32, 8, 96, 96),)),
            "head dim must be [64, 128] with log-sum-exp on CUDA arch 9, got 96: a non-causal tile",
        ),
        (BOTH[0], replace(H200, dtype=torch.float32), "dtype must be"),
        (BOTH[0], replace(H200, kv_dtype=torch.float8_e4m3fn), "KV dtype must be"),
        (BOTH[0], replace(H200, masks=frozenset({MaskKind.TREE})), "mask kind must be ['causal']"),
        (
            BOTH[1],
            replace(H200, cuda_arch=(10, 0)),
            "CUDA arch must be at most (9, 9), got (10, 0)",
        ),
        (BOTH[1], replace(H200, sinks=True), "attention sinks must be absent"),
    ],
)
def test_what_the_library_cannot_do_is_a_reason(
    backend_class: type[AttentionBackend], config: AttentionConfig, text: str
) -> None:
    assert any(text in reason for reason in backend_class().unsupported_reasons(config))


@pytest.mark.usefixtures("for_another_machine")
def test_a_head_dim_of_96_is_served_where_nobody_asks_for_lse() -> None:
    config = replace(H200, heads=(Heads(32, 8, 96, 96),), needs_lse=False)
    assert FlashAttention4Backend().unsupported_reasons(config) == []


def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, where neither library can be imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("flash_attn", "flash_attn_interface", "flash_attn_3"):
        for known in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
    monkeypatch.setattr(sys, "path", [])


@pytest.mark.parametrize(
    ("backend_class", "text"),
    [
        (BOTH[0], "flash-attn-4 must be installed, got no such package"),
        (
            BOTH[1],
            "one of flash_attn_interface, flash_attn_3.flash_attn_interface, sgl_kernel.flash_attn "
            "must be importable, got none of them",
        ),
    ],
)
def test_a_missing_library_is_a_reason_on_a_machine_with_a_gpu(
    backend_class: type[AttentionBackend], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_libraries(monkeypatch)
    assert backend_class().unsupported_reasons(H200) == [text]


@pytest.mark.parametrize(
    ("backend_class", "text"),
    [
        (
            BOTH[0],
            "attention backend fa4 must be an importable flash_attn.cute.interface, got .*; "
            r"pip install 'paceline\[fa4\]', or choose",
        ),
        (
            BOTH[1],
            "attention backend fa3 must be an importable flash_attn_interface or "
            "flash_attn_3.flash_attn_interface or sgl_kernel.flash_attn, got "
            "flash_attn_interface: .*; flash_attn_3.*; sgl_kernel.flash_attn: .*; "
            r"pip install 'paceline\[fa3\]', or choose",
        ),
    ],
)
def test_buffers_without_the_library_name_what_to_install(
    backend_class: type, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_libraries(monkeypatch)
    with pytest.raises(ConfigError, match=text):
        backend_class().make_buffers(limits(build(IN_BF16)))


@pytest.mark.parametrize(
    ("backend_class", "name"),
    [(BOTH[0], "flash_attn.cute.interface"), (BOTH[1], "flash_attn_interface")],
)
def test_the_real_library_is_imported_when_none_is_given(
    backend_class: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, name, flash_attn)
    check(backend_class(), IN_BF16)


@either
def test_a_plan_takes_of_larger_buffers_what_its_step_needs(backend_class: type) -> None:
    built = built_finite(replace(IN_BF16, prefix_lens=(3, 0), extend_lens=(2, 2)))
    most = replace(limits(built), max_reqs=9, max_tokens=40)
    backend = backend_class(flash_attn)
    plan = backend.plan(built.view, backend.make_buffers(most))
    assert plan.prefix_used.tolist() == [3, 1]
    assert plan.lacks_prefix.tolist() == [False, False, True, True]
