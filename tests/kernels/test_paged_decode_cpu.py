"""Decode attention on the CPU against the paged definition, and its slots against the docstring."""

import math
from dataclasses import fields, replace

import pytest
import torch
from paged_cases import BatchSpec, PagedCase, Shape, first_key_dropped, make_case, worst_error
from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.core.errors import KernelArgumentError
from paceline.core.model.lookback import Chunk, Lookback
from paceline.kernels.openblas import computes_alone
from paceline.kernels.paged_decode_cpu import decode_slots_cpu, paged_decode_cpu
from paceline.runner.recording.recorded import RecordedGraph

SHAPES = {
    "mha-page1": Shape(num_heads=2, num_kv_heads=2, head_dim=16, v_head_dim=16, page_size=1),
    "mqa-page5": Shape(num_heads=5, num_kv_heads=1, head_dim=24, v_head_dim=24, page_size=5),
    "gqa-wide-v": Shape(num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=40, page_size=16),
    "gqa-narrow-v": Shape(num_heads=4, num_kv_heads=2, head_dim=40, v_head_dim=8, page_size=4),
}
BATCHES = {
    "one": BatchSpec(prefix_lens=(37,), extend_lens=(1,)),
    "ragged": BatchSpec(prefix_lens=(96, 0, 42, 7, 15, 16), extend_lens=(1,) * 6),
    "unlike": BatchSpec(prefix_lens=(3, 700, 1, 690, 0, 200), extend_lens=(1,) * 6),
}


def empty_lists(case: PagedCase) -> dict[str, Tensor]:
    """The buffers a backend allocates for `case`, by argument name, full of nonsense."""
    (group,) = TorchBackend().make_buffers(case.limits)
    values = {field.name: getattr(group, field.name) for field in fields(group)}
    lists = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for tensor in lists.values():
        tensor.fill_(math.nan if tensor.is_floating_point() else -1)
    return lists


def list_slots(case: PagedCase, lists: dict[str, Tensor]) -> None:
    decode_slots_cpu(
        case.page_table,
        case.kv_lens,
        page_size=case.shape.page_size,
        window=case.shape.window,
        **lists,
    )


def attend(case: PagedCase, lists: dict[str, Tensor]) -> Tensor:
    """q is a slice of a fused row, as a model's is."""
    list_slots(case, lists)
    return paged_decode_cpu(case.q, case.cache, case.weighing, **lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_equals_the_definition(
    shape: str, batch: str, window: int | None, dtype: torch.dtype
) -> None:
    """Page 0, free pages and the tail of each last page hold NaN: one foreign key would show."""
    case = make_case(BATCHES[batch], replace(SHAPES[shape], window=window, dtype=dtype), seed=1)
    out = attend(case, empty_lists(case))
    assert out.dtype is dtype
    assert worst_error(case, out) <= 1.0
    if dtype == torch.float32:
        assert not worst_error(case, first_key_dropped(case)) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sinks", "is_fp8"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch", BATCHES)
def test_decode_with_sinks_and_scales_equals_the_definition(
    batch: str, sinks: bool, is_fp8: bool, dtype: torch.dtype
) -> None:
    shape = replace(SHAPES["gqa-wide-v"], dtype=dtype, sinks=sinks)
    if is_fp8:
        shape = replace(shape, kv_dtype=torch.float8_e4m3fn)
    case = make_case(BATCHES[batch], shape, seed=3)
    out = attend(case, empty_lists(case))
    assert out.dtype is dtype
    assert worst_error(case, out) <= 1.0
    for name in ("sinks", "k_scale", "v_scale"):
        value = getattr(case, name)
        if value is not None:
            assert worst_error(replace(case, **{name: value + 0.5}), out) > 1.0


def test_the_slots_are_those_of_the_worked_example() -> None:
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=8, v_head_dim=8, page_size=4)
    case = make_case(BatchSpec(prefix_lens=(2, 5), extend_lens=(1, 1)), shape, seed=0)
    case.page_table[:, :2].copy_(torch.tensor([[2, 0], [5, 7]]))
    lists = empty_lists(case)
    list_slots(case, lists)
    inf = math.inf
    assert lists["extents"].tolist() == [[3, 8], [6, 0]]
    assert lists["slots"][:12].view(2, 6).tolist() == [
        [8, 9, 10, 8, 8, 8],
        [20, 21, 22, 23, 28, 29],
    ]
    assert lists["bias"][:12].view(2, 6).tolist() == [[0, 0, 0, -inf, -inf, -inf], [0] * 6]


def test_a_windowed_request_lists_its_last_keys_alone() -> None:
    shape = Shape(num_heads=1, num_kv_heads=1, head_dim=8, v_head_dim=8, page_size=4, window=3)
    case = make_case(BatchSpec(prefix_lens=(1, 5), extend_lens=(1, 1)), shape, seed=0)
    case.page_table[:, :2].copy_(torch.tensor([[2, 0], [5, 7]]))
    lists = empty_lists(case)
    list_slots(case, lists)
    assert lists["slots"][:6].view(2, 3).tolist() == [[8, 9, 8], [23, 28, 29]]
    assert lists["bias"][:6].view(2, 3).tolist() == [[0, 0, -math.inf], [0, 0, 0]]


@pytest.mark.parametrize(
    ("pages", "kv_len", "window", "extent"),
    [
        ([5, 6], 6, None, [6, 20]),
        ([5, 6], 6, 9, [6, 20]),
        ([5, 6], 6, 3, [3, 23]),
        ([5, 6], 8, 4, [4, 24]),
        ([5, 6], 8, 1, [1, 27]),
        ([5, 2], 8, 4, [4, 8]),
        ([5, 6], 8, Chunk(3), [2, 26]),
        ([5, 6], 7, Chunk(3), [1, 26]),
        ([5, 7], 6, None, [6, 0]),  # not neighbours
        ([0, 1], 6, None, [6, 0]),  # page 0 is padding's
    ],
)
def test_a_single_request_in_one_run_of_pages_is_read_in_place(
    pages: list[int], kv_len: int, window: Lookback | None, extent: list[int]
) -> None:
    lists = {
        "extents": torch.full((1, 2), -1),
        "slots": torch.full((8,), -1, dtype=torch.int32),
        "bias": torch.zeros(8),
    }
    page_table = torch.tensor([[*pages, 0]], dtype=torch.int32)
    kv_lens = torch.tensor([kv_len], dtype=torch.int32)
    decode_slots_cpu(page_table, kv_lens, page_size=4, window=window, **lists)
    assert lists["extents"].tolist() == [extent]
    assert lists["slots"].eq(-1).all() == (extent[1] > 0)


@pytest.mark.skipif(not computes_alone(), reason="one thread with OpenBLAS and AVX-512")
@pytest.mark.parametrize(("page_size", "in_place"), [(16, False), (1024, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_long_requests_are_multiplied_one_by_one(
    shape: str, page_size: int, in_place: bool
) -> None:
    """Of pages that follow one another; in place where those of a request are neighbours."""
    case = make_case(BATCHES["unlike"], replace(SHAPES[shape], page_size=page_size), seed=4)
    follow = {name: getattr(case, name).contiguous() for name in ("k_cache", "v_cache")}
    case = replace(case, **follow)
    lists = empty_lists(case)
    list_slots(case, lists)
    assert bool(lists["extents"][:, 1].all()) is in_place
    if in_place:
        lists["slots"].fill_(-1)
    assert worst_error(case, paged_decode_cpu(case.q, case.cache, case.weighing, **lists)) <= 1.0


def test_a_replay_reads_the_lengths_of_that_moment() -> None:
    case = make_case(BATCHES["unlike"], SHAPES["gqa-wide-v"], seed=2)
    lists, out = empty_lists(case), torch.zeros(6, 6, 40)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: out.copy_(attend(case, lists)))
    assert worst_error(case, out) <= 1.0
    case.prefix_lens.sub_(5).clamp_(min=0)
    case.kv_lens.copy_(case.prefix_lens + 1)
    assert worst_error(case, out) > 1.0
    graph.replay()
    assert worst_error(case, out) <= 1.0


@pytest.mark.parametrize("change", [{"soft_cap": 3.0}, {"prefix_only": True}], ids=str)
def test_what_it_does_not_read_is_refused(change: dict[str, object]) -> None:
    case = make_case(BATCHES["one"], SHAPES["mha-page1"], seed=1)
    weighing = case.weighing._replace(**change)
    with pytest.raises(KernelArgumentError, match="be without a soft cap, over all keys, got"):
        paged_decode_cpu(case.q, case.cache, weighing, **empty_lists(case))
