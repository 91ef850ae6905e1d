"""The vendors' backends for latents, on their emulators: plans and refusals.

Cells of theirs are in tests/proof/check/test_latent_cells.py.
"""

import sys
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from latent_steps import H200, LATENTS, LIMITS, SPEC, view_of
from torch import Tensor

from paceline.attention.backends import flashinfer_mla_backend, flashmla_backend
from paceline.attention.backends.flashinfer_mla_backend import FlashInferMLABackend
from paceline.attention.backends.flashinfer_wrappers import RING
from paceline.attention.backends.flashmla_backend import FlashMLABackend
from paceline.attention.contract import (
    AttentionBackend,
    LayerCache,
    Part,
)
from paceline.attention.held import tensor_bytes
from paceline.attention.measurements import Phase
from paceline.attention.registry import choose
from paceline.core.errors import ConfigError, KernelArgumentError
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout
from paceline.kernels.stand_in import multiprocessors
from paceline.kernels.step_view import StepView
from paceline.proof.emulators import flashinfer_mla, flashmla

BOTH = [FlashMLABackend, FlashInferMLABackend]
either = pytest.mark.parametrize("backend_class", BOTH, ids=["flashmla", "flashinfer_mla"])
# --- plans ----------------------------------------------------------------------------------------


def flashmla_plan(view: StepView, **limits: Any) -> flashmla_backend.FlashMLAPlan:
    backend = FlashMLABackend(flashmla)
    return backend.plan(view, backend.make_buffers(replace(LIMITS, **limits)))


def layer_over(cache: Tensor, group: int = 0) -> LayerCache:
    """cache: [num_pages, 64, 1, 576]."""
    return LayerCache(
        spec=replace(SPEC, group=group),
        k_cache=cache,
        v_cache=cache[..., :512],
        k_scale=None,
        v_scale=None,
        sinks=None,
    )


def test_requests_of_as_many_queries_are_packed() -> None:
    (call,) = flashmla_plan(view_of([5, 70], [3, 3])).calls[Part.ALL]
    assert call.kv_lens.tolist() == [8, 73]
    assert call.tokens == slice(0, 6)
    assert call.page_tables[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert list(call.schedules) == [4]


@pytest.mark.parametrize(
    "extends", [[1, 3], [17, 17], [2, 0]], ids=["ragged", "many", "as many as requests"]
)
def test_other_tokens_are_requests_by_themselves(extends: list[int]) -> None:
    plan = flashmla_plan(view_of([5, 70], extends))
    (call,) = plan.calls[Part.ALL]
    first = extends[0]
    assert plan.queries == 1
    wanted = [*range(6, 6 + first), *range(71, 71 + extends[1])]
    assert call.kv_lens.tolist() == wanted
    assert call.page_tables[0].tolist() == [[1, 2, 3]] * first + [[4, 5, 6]] * extends[1]


def test_a_call_holds_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmla_backend, "TOKENS_AT_ONCE", 7)
    packed = flashmla_plan(view_of([5, 70, 9], [3, 3, 3])).calls[Part.ALL]
    assert [call.tokens for call in packed] == [slice(0, 6), slice(6, 9)]
    alone = flashmla_plan(view_of([5, 70], [1, 9])).calls[Part.ALL]
    assert [call.tokens for call in alone] == [slice(0, 7), slice(7, 10)]
    assert [call.kv_lens.tolist() for call in alone] == [[6, *range(71, 77)], [77, 78, 79]]


def test_a_prefix_is_planned_where_it_may_be_asked_for() -> None:
    view = view_of([0, 70], [2, 2])
    assert list(flashmla_plan(view).calls) == [Part.ALL]
    assert flashmla_plan(view).lacks_prefix is None
    plan = flashmla_plan(view, prefix_alone=True)
    assert plan.calls[Part.PREFIX][0].kv_lens.tolist() == [1, 70]
    assert plan.lacks_prefix is not None
    assert plan.lacks_prefix.flatten().tolist() == [True, True, False, False]


def test_pieces_of_a_step_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three and in two calls and whole: the same rows, and the same lse."""
    view, cache = view_of([0, 70, 9], [1, 2, 3]), torch.randn(10, 64, 1, 576).bfloat16()
    layer = layer_over(cache)
    q, backend = torch.randn(6, 4, 576).bfloat16(), FlashMLABackend(flashmla)

    def outputs(part: Part) -> tuple[Tensor, Tensor | None]:
        plan = flashmla_plan(view, prefix_alone=True)
        return backend.forward(q, q, q, layer, plan, part)

    whole = {part: outputs(part) for part in (Part.ALL, Part.PREFIX)}
    for at_once, (part, (out, lse)) in product((2, 3), whole.items()):
        monkeypatch.setattr(flashmla_backend, "TOKENS_AT_ONCE", at_once)
        again, lse_again = outputs(part)
        assert torch.equal(again, out)
        assert (lse is None) == (lse_again is None) == (part is Part.ALL)
        if lse is not None and lse_again is not None:
            assert torch.equal(lse_again, lse)
            assert lse[0].isneginf().all()


def test_queries_of_a_packed_request_see_the_keys_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view, cache = view_of([5, 70], [2, 2]), torch.randn(7, 64, 1, 576).bfloat16()
    layer = layer_over(cache)
    q, backend = torch.randn(4, 4, 576).bfloat16(), FlashMLABackend(flashmla)
    packed, _ = backend.forward(q, q, q, layer, flashmla_plan(view), Part.ALL)
    monkeypatch.setattr(flashmla_backend, "MOST_QUERIES", 1)
    alone, _ = backend.forward(q, q, q, layer, flashmla_plan(view), Part.ALL)
    assert torch.equal(packed, alone)


def step_of(view: StepView, epoch: int = 1) -> Step:
    return Step(
        epoch=epoch,
        layout=StepLayout(
            rows=tuple(range(1, view.padded_reqs + 1)),
            extend_lens=tuple(view.extend_lens.tolist()),
            emits=(True,) * view.padded_reqs,
        ),
        is_ragged=True,
        prefix_lens_bound=tuple(view.prefix_lens.tolist()),
        sampler=SamplerTier.GREEDY,
        logprobs=False,
        deltas=(),
    )


def test_wrappers_take_turns_over_one_schedule() -> None:
    backend, view = FlashInferMLABackend(flashinfer_mla), view_of([5, 70], [1, 2])
    buffers = backend.make_buffers(LIMITS)
    ((key, ring), _) = buffers.rings.items()
    found = []
    for epoch in range(1, RING + 2):
        backend.host_plan(step_of(view, epoch), buffers)
        assert ring.planned is not None
        found.append(ring.planned[1])
    assert len({id(wrapper) for wrapper in found}) == RING
    assert found[0] is found[RING]
    pinned = {wrapper._pin_memory_int_workspace_buffer.data_ptr() for wrapper in found}
    assert len(pinned) == RING
    places = {wrapper._int_workspace_buffer.data_ptr() for wrapper in found}
    assert places == {buffers.schedules[key].data_ptr()}


def test_a_forward_of_what_no_host_plan_planned_is_refused() -> None:
    backend, view = FlashInferMLABackend(flashinfer_mla), view_of([5, 70], [1, 2])
    buffers = backend.make_buffers(LIMITS)
    cache = torch.zeros(7, 64, 1, 576).bfloat16()
    layer = layer_over(cache)
    q = torch.zeros(3, 4, 576).bfloat16()
    backend.host_plan(step_of(view_of([5, 70], [1, 1])), buffers)
    plan = backend.plan(view, buffers)
    with pytest.raises(KernelArgumentError, match="a part and layer constants of the step's host"):
        backend.forward(q, q, q, layer, plan, Part.ALL)


def test_each_layer_reads_the_page_table_of_its_group() -> None:
    view, cache = view_of([5, 70], [1, 1]), torch.randn(7, 64, 1, 576).bfloat16()
    layer = layer_over(cache, group=1)
    ((group,), other) = view.groups, view.groups[0].page_table.flip(0)
    both = replace(view, groups=(replace(group, page_table=other), group))
    q, backend = torch.randn(2, 4, 576).bfloat16(), FlashMLABackend(flashmla)
    alone, _ = backend.forward(q, q, q, layer_over(cache), flashmla_plan(view), Part.ALL)
    of_two, _ = backend.forward(q, q, q, layer, flashmla_plan(both), Part.ALL)
    assert torch.equal(of_two, alone)


def test_steps_that_outgrow_a_schedule_are_refused_when_buffers_are_made() -> None:
    """A unit for 64 or 128 rows of most heads and one for each request, and the processors."""
    backend = FlashInferMLABackend(flashinfer_mla)
    many, few = replace(SPEC, num_heads=128), replace(SPEC, num_heads=16)
    room = 16384 - LIMITS.max_reqs - multiprocessors(LIMITS.device)
    fits = replace(LIMITS, layers=(few, many), max_tokens=room)
    text = (
        "steps for attention backend flashinfer_mla must be of at most 16384 units of work, got "
        rf"16385: {room + 1} tokens of 128 heads, 4 requests; lower --max-num-batched-tokens"
    )
    with pytest.raises(ConfigError, match=text):
        backend.make_buffers(replace(fits, max_tokens=room + 1))
    assert backend.make_buffers(fits).rings
    assert backend.make_buffers(replace(fits, layers=(few,), max_tokens=16384)).rings


def test_the_budget_counts_what_buffers_hold() -> None:
    made = FlashInferMLABackend(flashinfer_mla).make_buffers(LIMITS)
    assert FlashInferMLABackend().buffer_bytes(LIMITS) == tensor_bytes(made)


def test_the_budget_counts_what_a_call_of_flashmla_allocates() -> None:
    """[requests + splits, queries * heads, 512] float32, and an lse of each row."""
    backend, limits = FlashMLABackend(flashmla), replace(LIMITS, max_tokens=100)
    assert not tensor_bytes(backend.make_buffers(limits))
    few, many = (FlashMLABackend().buffer_bytes(replace(limits, max_tokens=n)) for n in (1, 100))
    assert many - few == 99 * 4 * 513 * 4
    assert few >= (1 + 1) * 64 * 513 * 4
    capped = (FlashMLABackend().buffer_bytes(replace(limits, max_tokens=n)) for n in (1024, 9000))
    assert len({*capped}) == 1


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: what is installed says nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@either
@pytest.mark.usefixtures("for_another_machine")
@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_latents_on_a_hopper_gpu_are_served(
    heads: int, backend_class: type[AttentionBackend]
) -> None:
    wanted = replace(H200, heads=(replace(LATENTS, num_heads=heads),))
    assert backend_class().unsupported_reasons(wanted) == []


@either
@pytest.mark.usefixtures("for_another_machine")
def test_every_reason_is_named(backend_class: type[AttentionBackend]) -> None:
    wanted = replace(
        H200,
        dtype=torch.float32,
        kv_dtype=torch.float8_e4m3fn,
        heads=(replace(LATENTS, head_dim=512), Heads(16, 1, 288, 256, v_in_k=True)),
        window=True,
        soft_cap=True,
        sinks=True,
        masks=frozenset({MaskKind.TREE}),
    )
    reasons = "\n".join(backend_class().unsupported_reasons(wanted))
    for text in (
        "dtype must be ['torch.bfloat16', 'torch.float16'], got torch.float32",
        "KV dtype must be",
        "latent dims must be [(512, 64)], got (512, 0)",
        "latent dims must be [(512, 64)], got (256, 32)",
        "sliding window must be absent",
        "soft cap must be absent",
        "attention sinks must be absent",
        "mask kind must be ['causal'], got ['tree']",
    ):
        assert text in reasons


@either
@pytest.mark.usefixtures("for_another_machine")
def test_heads_with_values_of_their_own_are_refused(backend_class: type[AttentionBackend]) -> None:
    wanted = replace(H200, heads=(Heads(32, 8, 128, 128),))
    text = "each layer must be of latents, with V in K, got 32/8 heads of 128"
    assert backend_class().unsupported_reasons(wanted) == [text]


@pytest.mark.usefixtures("for_another_machine")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"page_size": 16}, "page size must be [64], got 16"),
        ({"cuda_arch": (10, 0)}, "CUDA arch must be at most (9, 9), got (10, 0)"),
        ({"cuda_arch": (8, 0)}, "CUDA arch must be at least (9, 0), got (8, 0)"),
    ],
)
def test_flashmla_wants_pages_of_64_and_a_hopper_gpu(changes: dict[str, Any], text: str) -> None:
    assert FlashMLABackend().unsupported_reasons(replace(H200, **changes)) == [text]


@pytest.mark.usefixtures("for_another_machine")
@pytest.mark.parametrize("name", ["flashmla", "flashinfer_mla"])
def test_trees_run_by_cascade(name: str) -> None:
    trees = replace(H200, masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}))
    assert choose(trees, name).name == f"cascade({name})"


@pytest.mark.usefixtures("for_another_machine")
@pytest.mark.parametrize(
    ("heads", "phase", "name"),
    [
        (16, "prefill", "flashinfer_mla"),
        (16, "decode", "triton"),
        (128, "prefill", "flashmla"),
        (128, "decode", "flashmla"),
    ],
)
def test_auto_takes_the_fastest_that_was_measured(
    heads: int, phase: Phase, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(H200, heads=(replace(LATENTS, num_heads=heads),))
    monkeypatch.setattr("paceline.attention.registry.installed_version", lambda package: "1")
    assert choose(wanted, phase=phase, gpu="NVIDIA H200").name == name
    monkeypatch.setattr("paceline.attention.registry.installed_version", lambda package: None)
    assert choose(wanted, phase=phase, gpu="NVIDIA H200").name == "triton"


@pytest.mark.parametrize(
    ("backend_class", "text"),
    [
        (FlashMLABackend, "sgl_kernel.flash_mla must be importable, got no such module"),
        (FlashInferMLABackend, "flashinfer must be installed, got no such package"),
    ],
)
def test_this_machine_must_have_the_library(
    backend_class: type[AttentionBackend], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "path", [])
    assert backend_class().unsupported_reasons(H200) == [text]


def test_buffers_without_flashmla_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    text = (
        "attention backend flashmla must be an importable sgl_kernel.flash_mla, got "
        "ModuleNotFoundError: .*; pip install 'paceline\\[fa3\\]', or choose another"
    )
    with pytest.raises(ConfigError, match=text):
        FlashMLABackend().make_buffers(LIMITS)


def test_the_real_libraries_are_imported_when_buffers_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, flashmla_backend.MODULE, flashmla)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, flashinfer_mla_backend.MODULE, flashinfer_mla)
    assert FlashMLABackend().make_buffers(LIMITS).library is flashmla
    buffers, view = FlashInferMLABackend().make_buffers(LIMITS), view_of([5], [1])
    FlashInferMLABackend().host_plan(step_of(view), buffers)
    assert FlashInferMLABackend().plan(view, buffers).wrappers
