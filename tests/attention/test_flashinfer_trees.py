"""Trees of the flashinfer backend: the prefix by pages, the step's own rows under bits, merged."""

from dataclasses import replace

import numpy
import pytest
import torch
from attention_cases import Built, build, walk
from attention_runs import difference, limits
from flashinfer_cases import CHAIN, TOLERANCE, Counting, check, forward, moved, run, step_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.attention.backends.flashinfer_backend import FlashInferBackend, FlashInferBuffers
from paceline.attention.backends.flashinfer_tree import TreeMask
from paceline.attention.backends.flashinfer_wrappers import RING, StepShape
from paceline.attention.cascade import cascade
from paceline.attention.contract import AttentionConfig, GraphSupport, Part
from paceline.attention.registry import choose
from paceline.core.errors import KernelArgumentError
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.proof.emulators import flashinfer as emulator
from paceline.runner.recording.recorded import RecordedGraph

TREE = replace(CHAIN, mask=MaskKind.TREE, extend_lens=(5, 5, 5))
CASES = {
    "plain": TREE,
    "page-1": replace(TREE, page_size=1, prefix_lens=(0, 1, 18)),
    "page-16": replace(TREE, page_size=16, prefix_lens=(16, 15, 17)),
    "no-prefix": replace(TREE, prefix_lens=(0, 0, 0)),
    "no-prefix-sinks": replace(TREE, prefix_lens=(0, 0, 0), has_sinks=True),
    "capped": replace(TREE, soft_cap=0.5),
    "sinks": replace(TREE, has_sinks=True),
    "sinks-capped": replace(TREE, has_sinks=True, soft_cap=0.5),
    "mqa": replace(TREE, heads=7, kv_heads=1),
    "mha": replace(TREE, heads=3, kv_heads=3),
    "fp16": replace(TREE, dtype=torch.float16),
    "fp8": replace(TREE, is_fp8=True),
    "fp8-sinks-capped": replace(TREE, is_fp8=True, has_sinks=True, soft_cap=0.5),
    "padded": replace(TREE, padded_reqs=2),
    "three-rows": replace(TREE, extend_lens=(3, 3, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_node_sees_its_prefix_and_its_ancestors(name: str) -> None:
    check(CASES[name])


def test_a_tree_of_roots_sees_what_a_decode_sees() -> None:
    one = replace(TREE, extend_lens=(1, 1, 1))
    out, _ = run(build(one))
    assert difference(out, walk(build(replace(one, mask=MaskKind.CAUSAL)))[0]) < TOLERANCE


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_lse_of_a_tree_counts_no_sink(has_sinks: bool) -> None:
    built = build(replace(TREE, has_sinks=has_sinks))
    _, lse = run(built)
    assert lse is not None
    assert difference(lse, walk(built)[1]) < 1e-3


@given(reqs=st.integers(1, 4), rows=st.integers(1, 12), seed=st.integers(0, 9))
def test_bits_are_packed_lowest_first_and_each_request_starts_a_byte(
    reqs: int, rows: int, seed: int
) -> None:
    seen = torch.rand(reqs * rows, rows, generator=torch.Generator().manual_seed(seed)) < 0.5
    shape = StepShape(Part.PREFIX, MaskKind.TREE, reqs, reqs * rows)
    mask = TreeMask.make(shape, torch.device("cpu"))
    mask.bits.fill_(255)
    mask.pack(seen)
    wanted = [
        numpy.packbits(seen[rows * r : rows * r + rows].numpy(), bitorder="little")
        for r in range(reqs)
    ]
    assert numpy.array_equal(mask.bits.numpy(), numpy.concatenate(wanted))
    starts = numpy.cumsum([0, *(len(bits) for bits in wanted)])
    assert mask.bytes_indptr.tolist() == starts.tolist()
    assert mask.rows_indptr.tolist() == [rows * r for r in range(reqs + 1)]


# --- replays --------------------------------------------------------------------------------------


def recorded(
    built: Built, backend: FlashInferBackend, buffers: FlashInferBuffers
) -> tuple[RecordedGraph, tuple[Tensor, Tensor], list[Tensor]]:
    """(a graph of the step, the k and v it reads, its out)."""
    k, v = built.paged.fresh_rows()
    found: list[Tensor] = []

    def step() -> None:
        plan = backend.plan(built.view, buffers)
        found.append(backend.forward(built.q, k, v, built.layer, plan, Part.ALL)[0])

    backend.host_plan(step_of(built), buffers)
    graph = RecordedGraph(poison=True)
    graph.capture(step)
    return graph, (k, v), found


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_graph_replays_another_tree_of_other_requests(is_fp8: bool) -> None:
    case = replace(TREE, is_fp8=is_fp8)
    built, backend = build(case), FlashInferBackend(emulator)
    other = build(replace(case, prefix_lens=(4, 1, 9)), seed=1)
    assert built.view.tree_mask is not None
    built.view.tree_mask.copy_(torch.eye(5, dtype=torch.bool).repeat(3, 1))  # captured: roots
    buffers = backend.make_buffers(limits(built))
    graph, fresh, found = recorded(built, backend, buffers)
    moved(built, other)
    for rows, others in zip(fresh, other.paged.fresh_rows(), strict=True):
        rows.copy_(others)
    backend.host_plan(step_of(other, epoch=2), buffers)
    graph.replay()
    wanted = walk(other)[0]
    assert difference(found[0].double(), wanted) < TOLERANCE
    chain = walk(other, replace(other.case, mask=MaskKind.CAUSAL))[0]
    assert difference(chain, wanted) > 2 * TOLERANCE


# --- wrappers -------------------------------------------------------------------------------------


def test_own_rows_are_planned_once_for_a_shape() -> None:
    library, built = Counting(), build(TREE)
    backend = FlashInferBackend(library)
    buffers = backend.make_buffers(limits(built))
    for epoch in range(1, RING + 1):
        backend.host_plan(step_of(built, epoch=epoch), buffers)
        out = forward(built, backend, buffers)[0].double()
        assert difference(out, walk(built)[0]) < TOLERANCE
    assert len(library.plans) == RING + 1
    assert library.plans[RING] == 1, "made behind the ring"


def test_two_shapes_of_trees_keep_their_own_masks() -> None:
    backend = FlashInferBackend(emulator)
    large, small = build(TREE), build(replace(TREE, extend_lens=(3, 3, 3)))
    buffers = backend.make_buffers(limits(large))
    for built in (large, small, large):
        backend.host_plan(step_of(built), buffers)
        out = forward(built, backend, buffers)[0].double()
        assert difference(out, walk(built)[0]) < TOLERANCE


def test_layers_with_other_constants_merge_their_own_rows() -> None:
    plain, capped = build(TREE), build(replace(TREE, soft_cap=0.5))
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(plain, plain.layer.spec, capped.layer.spec))
    backend.host_plan(step_of(plain), buffers)
    for built in (plain, capped):
        out = forward(built, backend, buffers)[0].double()
        assert difference(out, walk(built)[0]) < TOLERANCE


# --- windows --------------------------------------------------------------------------------------


def test_with_windows_a_cascade_serves_every_layer_of_a_tree() -> None:
    plain, narrow = build(TREE), build(replace(TREE, window=3))
    library = Counting()
    backend = cascade(FlashInferBackend(library))
    buffers = backend.make_buffers(limits(plain, plain.layer.spec, narrow.layer.spec))
    backend.host_plan(step_of(plain), buffers)
    assert len(library.plans) == RING, "the prefix of the plain layer alone"
    for built in (plain, narrow):
        plan = backend.plan(built.view, buffers)
        out, _ = backend.forward(built.q, *built.paged.fresh_rows(), built.layer, plan, Part.ALL)
        assert difference(out.double(), walk(built)[0]) < TOLERANCE


def test_a_tree_beside_windows_without_a_cascade_is_refused() -> None:
    plain, narrow = build(TREE), build(replace(TREE, window=3))
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(plain, plain.layer.spec, narrow.layer.spec))
    backend.host_plan(step_of(plain), buffers)
    with pytest.raises(KernelArgumentError, match="trees with windows run by cascade"):
        forward(plain, backend, buffers)


WISH = AttentionConfig(
    device_type="cuda",
    cuda_arch=(9, 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=16,
    heads=(Heads(8, 2, 128, 128),),
    window=False,
    soft_cap=True,
    sinks=True,
    masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
    needs_lse=False,
    graph=GraphSupport.ALWAYS,
)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_trees_without_windows_need_no_cascade(kv_dtype: torch.dtype) -> None:
    choice = choose(replace(WISH, kv_dtype=kv_dtype), "flashinfer")
    assert (choice.name, choice.why) == ("flashinfer", "asked for")


@pytest.mark.parametrize("lookback", [{"window": True}, {"chunks": frozenset({32})}], ids=str)
def test_trees_with_lookbacks_run_by_cascade_and_why_says_so(lookback: dict[str, object]) -> None:
    choice = choose(replace(WISH, **lookback), "flashinfer")
    assert choice.name == "cascade(flashinfer)"
    lacks = "no windows or chunks in a tree"
    assert choice.why == f"asked for; flashinfer has {lacks}, so trees run by cascade"
    [reason] = FlashInferBackend().unsupported_reasons(replace(WISH, **lookback))
    assert reason.endswith(" in a tree must be absent, got present")


def test_windows_without_trees_need_no_cascade() -> None:
    causal = replace(WISH, window=True, masks=frozenset({MaskKind.CAUSAL}))
    assert choose(causal, "flashinfer").name == "flashinfer"
