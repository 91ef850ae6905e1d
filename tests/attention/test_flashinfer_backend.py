"""The flashinfer backend on the library's emulator equals a walk over the keys in float64."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Built, build, walk, wrong_meanings
from attention_runs import difference, limits
from flashinfer_cases import (
    CHAIN,
    LSE_TOLERANCE,
    TOLERANCE,
    Counting,
    check,
    forward,
    moved,
    run,
    step_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from covers import Cell, cell_name, pairwise
from paceline.attention.backends.flashinfer_backend import (
    FlashInferBackend,
    FlashInferBuffers,
)
from paceline.attention.backends.flashinfer_session import may_be_recorded
from paceline.attention.backends.flashinfer_wrappers import RING, StepShape, WrapperRing
from paceline.attention.contract import AttentionConfig, AttentionSpec, GraphSupport, Part
from paceline.attention.registry import load_backend
from paceline.core.errors import KernelArgumentError
from paceline.core.model.config import Heads
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.core.step import StepLayout
from paceline.proof.emulators import flashinfer as emulator
from paceline.runner.recording.recorded import RecordedGraph

AXES: dict[str, tuple[Any, ...]] = {
    "page_and_window": ((1, None), (3, 2), (3, 3), (16, 17), (16, None)),
    "soft_cap": (None, 0.5),
    "extend_lens": ((1, 1, 1), (1, 2, 5), (5, 5, 5)),
    "heads": ((4, 2), (3, 3), (7, 1), (14, 2)),
}


@pytest.mark.parametrize("cell", pairwise(AXES), ids=cell_name)
def test_a_chain_of_any_kind_equals_the_walk(cell: Cell) -> None:
    chosen = dict(cell)
    (heads, kv_heads), (page_size, window) = chosen.pop("heads"), chosen.pop("page_and_window")
    case = replace(CHAIN, heads=heads, kv_heads=kv_heads, page_size=page_size, window=window)
    check(replace(case, **chosen))


@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("is_fp8", "has_sinks"), [(True, False), (False, True), (True, True)], ids=str
)
def test_sinks_and_quantised_caches(
    is_fp8: bool, has_sinks: bool, window: int | None, soft_cap: float | None
) -> None:
    check(replace(CHAIN, is_fp8=is_fp8, has_sinks=has_sinks, window=window, soft_cap=soft_cap))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_prefix_alone_has_no_sink(is_fp8: bool) -> None:
    case = replace(CHAIN, is_fp8=is_fp8, has_sinks=True, part=Part.PREFIX)
    check(replace(case, extend_lens=(2, 2, 2)))


def test_padded_rows_read_the_reserved_page() -> None:
    check(replace(CHAIN, extend_lens=(5, 5, 5), padded_reqs=2))


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.TREE])
@pytest.mark.parametrize("prefixes", [(0, 7, 18), (0, 0, 0)], ids=str)
def test_the_prefix_alone_has_a_natural_lse(mask: MaskKind, prefixes: tuple[int, ...]) -> None:
    case = replace(CHAIN, part=Part.PREFIX, mask=mask, prefix_lens=prefixes)
    built = build(replace(case, extend_lens=(5, 5, 5)))
    out, lse = run(built)
    assert lse is not None
    wanted, wanted_lse = walk(built)
    empty = wanted_lse.isinf()
    assert difference(out, wanted) < TOLERANCE
    assert torch.equal(lse.isneginf(), empty)
    assert difference(lse.masked_fill(empty, 0.0), wanted_lse.masked_fill(empty, 0.0)) < 1e-3


@pytest.mark.parametrize(("extend", "window"), [(1, 2), (1, 4), (3, 4), (3, 9), (16, 20)])
def test_a_window_over_the_prefix_counts_from_the_query(extend: int, window: int) -> None:
    case = replace(CHAIN, part=Part.PREFIX, window=window, extend_lens=(extend,) * 3)
    built = build(case)
    out, lse = run(built)
    wanted, wanted_lse = walk(built)
    assert difference(out, wanted) < TOLERANCE
    assert lse is not None
    assert difference(lse.exp(), wanted_lse.exp()) < LSE_TOLERANCE * wanted_lse.exp().max()
    for name in ("window one wider", "window one narrower"):
        wrong = wrong_meanings(built).get(name)
        assert wrong is None or difference(out, wrong[0]) > 2 * TOLERANCE


@pytest.mark.parametrize(("extend", "window"), [(3, 3), (17, 30)])
def test_a_window_over_the_prefix_that_the_library_cannot_say_is_refused(
    extend: int, window: int
) -> None:
    case = replace(CHAIN, part=Part.PREFIX, window=window, extend_lens=(extend,) * 3)
    with pytest.raises(KernelArgumentError, match="a window over the prefix alone must be longer"):
        run(build(case))


def test_a_forward_without_a_host_plan_is_refused() -> None:
    built, backend = build(CHAIN), FlashInferBackend(emulator)
    with pytest.raises(KernelArgumentError, match="call host_plan before plan"):
        forward(built, backend, backend.make_buffers(limits(built)))


# --- replays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("prefixes", "extends"), [((4, 1, 9), (1, 2, 5)), ((0, 2, 3), (5, 2, 1))], ids=str
)
def test_a_graph_replays_what_the_host_planned_last(
    prefixes: tuple[int, ...], extends: tuple[int, ...], window: int | None
) -> None:
    case = replace(CHAIN, window=window)
    built, backend = build(case), FlashInferBackend(emulator)
    other = build(replace(case, prefix_lens=prefixes, extend_lens=extends), seed=1)
    buffers = backend.make_buffers(limits(built))
    graph, found = RecordedGraph(poison=True), []
    backend.host_plan(step_of(built), buffers)
    graph.capture(lambda: found.append(forward(built, backend, buffers)[0]))
    moved(built, other)
    backend.host_plan(step_of(other, epoch=2), buffers)
    graph.replay()
    assert difference(found[0].double(), walk(other)[0]) < TOLERANCE
    assert difference(found[0].double(), walk(built)[0]) > 2 * TOLERANCE


def test_a_replay_without_its_host_plan_shows() -> None:
    built, backend = build(CHAIN), FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(built))
    graph, found = RecordedGraph(poison=True), []
    backend.host_plan(step_of(built), buffers)
    graph.capture(lambda: found.append(forward(built, backend, buffers)[0]))
    other = build(replace(CHAIN, prefix_lens=(4, 1, 9)), seed=1)
    moved(built, other)
    graph.replay()
    assert not difference(found[0].double(), walk(other)[0]) < TOLERANCE


def test_a_row_frozen_since_the_plan_leaves_the_others_alone() -> None:
    """The device has made it row 0: a shorter length, and PAD_PAGE for every page."""
    case = replace(CHAIN, extend_lens=(1, 1, 1))
    built = build(case)
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(built))
    backend.host_plan(step_of(built), buffers)
    frozen = 1
    built.view.groups[0].page_table[frozen] = 0
    built.view.kv_lens[frozen] = 2
    for cache in (built.layer.k_cache, built.layer.v_cache):
        cache[0] = 0.0
    out = forward(built, backend, buffers)[0].double()
    assert bool(out.isfinite().all())
    live = [row for row in range(3) if row != frozen]
    assert difference(out[live], walk(built)[0][live]) < TOLERANCE


# --- wrappers -------------------------------------------------------------------------------------


def planned_in_turn(epochs: range) -> Counting:
    library, built = Counting(), build(CHAIN)
    backend = FlashInferBackend(library)
    buffers = backend.make_buffers(limits(built))
    for epoch in epochs:
        backend.host_plan(step_of(built, epoch=epoch), buffers)
    return library


def test_a_shape_makes_its_wrappers_once_and_plans_each() -> None:
    assert planned_in_turn(range(1, 2)).plans == dict.fromkeys(range(RING), 1)


def test_wrappers_take_turns() -> None:
    """A pinned schedule is rewritten only after all others had their turn."""
    assert planned_in_turn(range(1, RING + 2)).plans == dict.fromkeys(range(RING), 2)
    assert sorted(planned_in_turn(range(1, 4)).plans.values()) == [1] * (RING - 2) + [2] * 2


def test_layers_with_equal_constants_share_wrappers() -> None:
    built = build(CHAIN)
    spec = built.layer.spec
    for layers, rings in (
        ((spec, replace(spec, layer_id=7)), 1),
        ((spec, replace(spec, layer_id=7, window=4)), 2),
        ((spec, replace(spec, scale=0.7), replace(spec, soft_cap=3.0)), 3),
    ):
        library = Counting()
        backend = FlashInferBackend(library)
        backend.host_plan(step_of(built), backend.make_buffers(limits(built, *layers)))
        assert len(library.plans) == rings * RING


def test_each_layer_runs_by_its_own_constants() -> None:
    narrow, built = build(replace(CHAIN, window=4)), build(CHAIN)
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(built, built.layer.spec, narrow.layer.spec))
    backend.host_plan(step_of(built), buffers)
    for each in (built, narrow):
        found = forward(each, backend, buffers)[0].double()
        assert difference(found, walk(each)[0]) < TOLERANCE


def stepping(built: Built, backend: FlashInferBackend, buffers: FlashInferBuffers) -> None:
    """One eager step."""
    backend.host_plan(step_of(built), buffers)
    assert difference(forward(built, backend, buffers)[0].double(), walk(built)[0]) < TOLERANCE


@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
def test_the_oldest_shape_that_no_graph_holds_is_forgotten(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "paceline.attention.backends.flashinfer_session"
    monkeypatch.setattr(f"{module}.KEPT_SHAPES", 2)
    monkeypatch.setattr(f"{module}.may_be_recorded", lambda device: is_recorded)
    shapes = [build(replace(CHAIN, extend_lens=(1, 2, n))) for n in (6, 5, 4)]
    library = Counting()
    backend = FlashInferBackend(library)
    buffers = backend.make_buffers(limits(shapes[0]))
    for built in (shapes[0], shapes[1], shapes[0], shapes[2]):  # the second is the oldest
        stepping(built, backend, buffers)
    sizes = [(each.view.padded_reqs, each.view.padded_tokens) for each in shapes]
    kept = {
        tokens
        for reqs, tokens in sizes
        if buffers.session.planned(StepShape(Part.ALL, MaskKind.CAUSAL, reqs, tokens))
    }
    assert kept == ({9, 8, 7} if is_recorded else {9, 7})
    made = len(library.plans)
    stepping(shapes[1], backend, buffers)
    assert len(library.plans) == made + (0 if is_recorded else RING)


def test_a_graph_may_always_be_recording_on_a_cpu() -> None:
    assert may_be_recorded(torch.device("cpu"))


def test_a_shape_that_two_modes_share_keeps_no_part_of_an_older_step() -> None:
    case = replace(CHAIN, extend_lens=(2, 2, 2), part=Part.PREFIX)
    older, built = build(case), build(replace(case, prefix_lens=(18, 0, 7)), seed=1)
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(built))
    backend.host_plan(step_of(older), buffers)
    backend.host_plan(step_of(built, epoch=2), buffers)
    out, lse = forward(built, backend, buffers)
    wanted, wanted_lse = walk(built)
    assert difference(out.double(), wanted) < TOLERANCE
    assert lse is not None
    assert torch.equal(lse.isinf(), wanted_lse.isinf())


def test_a_failed_plan_leaves_the_wrappers_that_a_graph_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, backend = build(CHAIN), FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(built))
    stepping(built, backend, buffers)
    shape = StepShape(Part.ALL, MaskKind.CAUSAL, built.view.padded_reqs, built.view.padded_tokens)
    held = buffers.session.planned(shape)
    monkeypatch.setattr(WrapperRing, "plan", fail)
    with pytest.raises(RuntimeError, match="no room"):
        backend.host_plan(step_of(built, epoch=2), buffers)
    assert buffers.session.planned(shape) is held is not None


def fail(*_: Any) -> None:
    raise RuntimeError("no room for a schedule")


def test_each_cache_group_has_its_own_pages() -> None:
    built, other = build(CHAIN), build(CHAIN, seed=1)
    view = replace(built.view, groups=(*built.view.groups, *other.view.groups))
    second = replace(other.layer.spec, group=1)
    most = limits(built, built.layer.spec, second)
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(replace(most, max_pages=most.max_pages * 2, windows=(None,) * 2))
    backend.host_plan(step_of(built), buffers)
    grouped = replace(other, layer=replace(other.layer, spec=second))
    for each in (built, grouped):
        found = forward(replace(each, view=view), backend, buffers)[0].double()
        assert difference(found, walk(each)[0]) < TOLERANCE


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from([1, 2, 4, 7]),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([64, 128, 256]),
    reqs=st.integers(1, 80),
    tokens=st.integers(1, 300),
    window=st.sampled_from([None, Chunk(24)]),
)
def test_workspaces_hold_the_plan_of_every_shape(
    group: int, kv_heads: int, head_dim: int, reqs: int, tokens: int, window: Chunk | None
) -> None:
    """Against the emulator's account of the library's allocator, largest step and smaller ones."""
    spec = AttentionSpec(
        layer_id=0,
        group=0,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=1.0,
        window=window,
        soft_cap=None,
    )
    built = build(CHAIN)
    sizes = {"max_reqs": reqs, "max_tokens": tokens, "max_pages": (110,), "windows": (window,)}
    most = replace(limits(built, spec), **sizes)
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(most)
    for num in {1, reqs}:
        for total in {1, tokens}:
            extends = (total,) + (0,) * (num - 1)
            backend.host_plan(
                replace(
                    step_of(built),
                    layout=StepLayout(
                        rows=tuple(range(num)), extend_lens=extends, emits=(True,) * num
                    ),
                    prefix_lens_bound=(1,) * num,
                ),
                buffers,
            )


# --- choosing it ----------------------------------------------------------------------------------


def wish(**changes: Any) -> AttentionConfig:
    fields: dict[str, Any] = {
        "device_type": "cuda",
        "cuda_arch": (9, 0),
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "page_size": 16,
        "heads": (Heads(8, 2, 128, 128),),
        "window": True,
        "soft_cap": True,
        "sinks": True,
        "masks": frozenset({MaskKind.CAUSAL}),
        "needs_lse": True,
        "graph": GraphSupport.ALWAYS,
    }
    return AttentionConfig(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device_type": "cpu"}, "device must be cuda, got cpu"),
        ({"cuda_arch": (7, 5)}, "CUDA arch must be at least (8, 0)"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "dtype must be"),
        ({"kv_dtype": torch.float16}, "KV dtype must be"),
        ({"heads": (Heads(8, 2, 96, 96),)}, "head dim must be [64, 128, 256], got 96"),
        ({"heads": (Heads(8, 2, 128, 64),)}, "V head dim must be that of K (128), got 64"),
        ({"masks": frozenset({MaskKind.FULL})}, "mask kind must be ['causal', 'tree']"),
        ({"masks": frozenset({MaskKind.TREE})}, "sliding window in a tree must be absent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_serve_has_a_reason(changes: dict[str, Any], text: str) -> None:
    assert any(
        text in reason for reason in FlashInferBackend().unsupported_reasons(wish(**changes))
    )


def test_another_machine_may_have_the_library() -> None:
    assert not FlashInferBackend().unsupported_reasons(wish())
    assert load_backend("flashinfer") == FlashInferBackend()


def test_this_machine_must_have_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reasons = FlashInferBackend().unsupported_reasons(wish())
    assert reasons == ["flashinfer must be installed, got no such package"]


def test_the_real_library_is_imported_when_buffers_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, built, backend = Counting(), build(CHAIN), FlashInferBackend()
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    stepping(built, backend, backend.make_buffers(limits(built)))
    assert library.plans
