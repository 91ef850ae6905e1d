"""Backends of kernels for Blackwell GPUs: rows, refusals, buffers.

Cells of theirs, on emulators, are in tests/proof/check/test_blackwell_cells.py.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from latent_steps import H200, LATENTS, LIMITS, SPEC, view_of
from torch import Tensor

from paceline.attention.backends import cutlass_mla_backend
from paceline.attention.backends.cutlass_mla_backend import CutlassMLABackend
from paceline.attention.backends.tokenspeed_mla_backend import TokenspeedMLABackend
from paceline.attention.backends.trtllm_mha_backend import TrtllmMHABackend
from paceline.attention.backends.trtllm_mla_backend import CuteDslMLABackend, TrtllmMLABackend
from paceline.attention.contract import AttentionBackend, AttentionConfig, LayerCache, Part
from paceline.attention.held import tensor_bytes
from paceline.attention.hybrid import hybrid
from paceline.attention.layouts.query_rows import query_rows, uniform_stride
from paceline.attention.registry import AUTO_ORDER, choose
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.proof.emulators import cutlass_mla, trtllm_mha, trtllm_mla

B200 = replace(H200, cuda_arch=(10, 0))
DENSE = replace(B200, heads=(Heads(32, 8, 128, 128),), page_size=16)
LARGE_PAGES = replace(B200, page_size=128, needs_lse=False)
ALL: list[tuple[type[AttentionBackend], AttentionConfig, str, str]] = [
    (TrtllmMLABackend, B200, "flashinfer.mla", "flashinfer-python"),
    (CuteDslMLABackend, B200, "flashinfer.mla", "flashinfer-python"),
    (TokenspeedMLABackend, B200, "tokenspeed_mla", "tokenspeed-mla"),
    (CutlassMLABackend, LARGE_PAGES, "sgl_kernel", "sglang-kernel"),
    (TrtllmMHABackend, DENSE, "flashinfer.decode", "flashinfer-python"),
]
each = pytest.mark.parametrize(
    ("backend_class", "served", "module", "package"), ALL, ids=[row[0].name for row in ALL]
)


@pytest.fixture
def for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: what is installed says nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# --- rows of a call -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [[5, 70], [0, 9, 3]])
def test_a_stride_is_where_the_queries_of_each_request_lie(prefixes: list[int]) -> None:
    view = view_of(prefixes, [3] * len(prefixes))
    stride = uniform_stride(view, 3)
    assert stride == 3
    offsets = torch.arange(view.padded_reqs + 1) * stride
    assert view.cu_seqlens_q.tolist() == offsets.tolist()
    rows = query_rows(view, stride, prefix=False)
    assert (rows.queries, rows.kv_lens) == (3, view.kv_lens)
    assert rows.page_tables[0] is view.groups[0].page_table


@pytest.mark.parametrize(
    ("extends", "most"),
    [([4, 1, 3], 9), ([3, 3], 2), ([2, 0], 9)],
    ids=["accepted", "many", "of 2"],
)
def test_where_no_stride_is_right_tokens_are_rows(extends: list[int], most: int) -> None:
    view = view_of([5, 70, 0][: len(extends)], extends)
    assert uniform_stride(view, most) is None
    rows = query_rows(view, None, prefix=False)
    assert rows.kv_lens.tolist() == (view.positions + 1).tolist()
    owners = [owner for owner, extend in enumerate(extends) for _ in range(extend)]
    tables = view.groups[0].page_table.tolist()
    assert rows.page_tables[0].tolist() == [tables[owner] for owner in owners]
    alone = query_rows(view, None, prefix=True)
    assert alone.kv_lens.tolist() == [max(1, [5, 70, 0][owner]) for owner in owners]


def test_tables_are_as_wide_as_whole_loads_of_page_ids() -> None:
    backend = TrtllmMLABackend(trtllm_mla)
    for size in (64, 32):
        buffers = backend.make_buffers(replace(LIMITS, page_size=size))
        plan = backend.plan(view_of([5, 70], [3, 3]), buffers)
        table = plan.rows[Part.ALL].page_tables[0]
        assert table.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]


@pytest.mark.parametrize(
    "backend", [TrtllmMLABackend(trtllm_mla), TrtllmMHABackend(trtllm_mha)], ids=lambda b: b.name
)
def test_a_prefix_alone_is_read_by_tokens(backend: Any) -> None:
    """Several queries of a row would be masked causally."""
    buffers = backend.make_buffers(replace(LIMITS, prefix_alone=True))
    plan = backend.plan(view_of([5, 0], [2, 2]), buffers)
    rows = plan.rows[Part.PREFIX] if isinstance(plan.rows, dict) else plan.prefix
    assert (rows.queries, rows.kv_lens.tolist()) == (1, [5, 5, 1, 1])
    assert plan.lacks_prefix.flatten().tolist() == [False, False, True, True]


def test_steps_of_one_stride_are_the_decode_functions() -> None:
    backend = TrtllmMHABackend(trtllm_mha)
    buffers = backend.make_buffers(LIMITS)
    rows = backend.plan(view_of([5, 70], [3, 3]), buffers).rows
    assert rows is not None
    assert rows.queries == 3
    assert backend.plan(view_of([5, 70], [1, 3]), buffers).rows is None


# --- calls ----------------------------------------------------------------------------------------


def test_a_call_of_cutlass_holds_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of two tokens and whole: the same rows."""
    view, cache = view_of([0, 70, 9], [1, 2, 3]), torch.randn(10, 128, 1, 576).bfloat16()
    layer = LayerCache(
        spec=SPEC, k_cache=cache, v_cache=cache[..., :512], k_scale=None, v_scale=None, sinks=None
    )
    q, backend = torch.randn(6, 4, 576).bfloat16(), CutlassMLABackend(cutlass_mla)
    limits = replace(LIMITS, page_size=128, max_tokens=6)

    def output() -> Tensor:
        buffers = backend.make_buffers(limits)
        plan = backend.plan(view, buffers)
        return backend.forward(q, q, q, layer, plan, Part.ALL)[0]

    whole, size = output(), tensor_bytes(backend.make_buffers(limits))
    monkeypatch.setattr(cutlass_mla_backend, "ROWS_AT_ONCE", 2)
    assert torch.equal(output(), whole)
    assert tensor_bytes(backend.make_buffers(limits)) * 3 == size


def test_halves_of_a_pair_count_in_workspaces_of_their_own() -> None:
    """One kernel leaves numbers where the other's counters must be 0."""
    pair = hybrid(TrtllmMLABackend(trtllm_mla), CuteDslMLABackend(trtllm_mla))
    buffers = pair.make_buffers(LIMITS)
    halves = buffers.prefill.workspace, buffers.decode.workspace
    assert halves[0].data_ptr() != halves[1].data_ptr()
    assert not any(half.any() for half in halves)


@pytest.mark.parametrize(
    "backend", [TrtllmMLABackend(trtllm_mla), TrtllmMHABackend(trtllm_mha)], ids=lambda b: b.name
)
def test_the_budget_counts_what_buffers_hold(backend: AttentionBackend) -> None:
    assert tensor_bytes(backend.make_buffers(LIMITS)) == backend.buffer_bytes(LIMITS)


# --- what is refused ------------------------------------------------------------------------------


@each
@pytest.mark.usefixtures("for_another_machine")
def test_a_hopper_gpu_is_refused_and_a_blackwell_one_served(
    backend_class: type[AttentionBackend], served: AttentionConfig, module: str, package: str
) -> None:
    assert backend_class().unsupported_reasons(served) == []
    with pytest.raises(BackendUnsupported) as caught:
        choose(replace(served, cuda_arch=(9, 0)), backend_class.name)
    assert caught.value.reasons == ["CUDA arch must be at least (10, 0), got (9, 0)"]
    (later,) = backend_class().unsupported_reasons(replace(served, cuda_arch=(12, 0)))
    assert later.startswith("CUDA arch must be at most (10, ")


@each
def test_an_explicit_choice_names_what_to_install(
    backend_class: type[AttentionBackend],
    served: AttentionConfig,
    module: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    text = f"{module} of {package} must be importable, got no such module"
    assert backend_class().unsupported_reasons(served) == [text]
    with pytest.raises(ConfigError, match=f"importable {module}.*; pip install {package}, or"):
        backend_class().make_buffers(LIMITS)


@each
def test_auto_chooses_none_that_has_not_run_on_a_gpu(
    backend_class: type[AttentionBackend], served: AttentionConfig, module: str, package: str
) -> None:
    assert all(backend_class.name not in order for order in AUTO_ORDER.values())


TREES = frozenset({MaskKind.CAUSAL, MaskKind.TREE})


@pytest.mark.usefixtures("for_another_machine")
def test_trees_need_a_log_sum_exp() -> None:
    for name in ("trtllm_mla", "cutedsl_mla", "tokenspeed_mla"):
        assert choose(replace(B200, masks=TREES), name).name == f"cascade({name})"
    assert choose(replace(DENSE, masks=TREES), "trtllm_mha").name == "cascade(trtllm_mha)"
    with pytest.raises(BackendUnsupported) as caught:
        choose(replace(LARGE_PAGES, masks=TREES), "cutlass_mla")
    assert caught.value.reasons == ["mask kind must be ['causal'], got ['causal', 'tree']"]


@pytest.mark.usefixtures("for_another_machine")
@pytest.mark.parametrize(
    ("backend_class", "asked", "text"),
    [
        (TrtllmMLABackend, replace(B200, page_size=128), "page size must be [32, 64], got 128"),
        (CutlassMLABackend, replace(LARGE_PAGES, page_size=64), "page size must be [128], got 64"),
        (
            CutlassMLABackend,
            replace(LARGE_PAGES, heads=(replace(LATENTS, num_heads=129),)),
            "heads must be at most 128, got 129",
        ),
        (CutlassMLABackend, replace(LARGE_PAGES, needs_lse=True), "log-sum-exp must be not needed"),
        (TrtllmMHABackend, replace(DENSE, page_size=128), "page size must be [16, 32, 64]"),
        (TrtllmMHABackend, replace(DENSE, heads=(LATENTS,)), "latent dims must be []"),
        (
            TrtllmMHABackend,
            replace(DENSE, window=True),
            "sliding window must be absent where the prefix is attended alone",
        ),
        (
            TokenspeedMLABackend,
            replace(B200, kv_dtype=torch.float8_e4m3fn),
            "KV dtype must be ['torch.bfloat16'], got torch.float8_e4m3fn",
        ),
    ],
)
def test_what_a_kernel_cannot_do_is_a_reason(
    backend_class: Any, asked: AttentionConfig, text: str
) -> None:
    reasons = backend_class().unsupported_reasons(asked)
    assert any(reason.startswith(text) for reason in reasons), reasons
