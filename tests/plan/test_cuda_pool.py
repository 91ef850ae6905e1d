"""The bytes that torch's caching allocator takes, by its published rules; tests/gpu asks it."""

import pytest
from draft_models import H200
from test_rehearsal import rehearsed

from paceline.plan.memory.cuda_pool import CudaPool
from paceline.plan.memory.rehearsal import graphs_held, largest_graphs

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "held"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)],
)
def test_a_segment_is_of_its_requests_kind(asked: int, held: int) -> None:
    pool = CudaPool()
    pool.take(asked)
    assert pool.held == held * MIB


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    pool = CudaPool()
    for _ in range(4096):  # pieces of 512 bytes
        pool.take(100)
    assert pool.held == 2 * MIB
    pool.take(1)
    assert pool.held == 4 * MIB


def test_a_large_piece_is_split_only_where_more_than_a_small_request_is_left() -> None:
    pool = CudaPool()
    pool.give_back(pool.take(12 * MIB))
    pool.take(11 * MIB)
    pool.take(MIB + 512)
    assert pool.held == 32 * MIB


def test_the_smallest_piece_that_holds_a_request_is_taken() -> None:
    pool = CudaPool()
    for piece in [pool.take(size * MIB) for size in (40, 12)]:
        pool.give_back(piece)
    pool.take(12 * MIB)
    pool.take(40 * MIB)
    assert pool.held == 52 * MIB


def test_free_neighbours_become_one_piece() -> None:
    pool = CudaPool()
    first, second, third = [pool.take(6 * MIB) for _ in range(3)]
    for piece in (first, third, second):
        pool.give_back(piece)
    pool.take(9 * MIB)
    pool.take(9 * MIB)
    assert pool.held == 20 * MIB


HEAD = {"algorithm": "EAGLE3", "path": "eagle3-llama-3.1-8b"}


@pytest.mark.parametrize(
    ("model", "asked", "measured"),
    [
        ("llama-3.1-8b", {"algorithm": "off"}, 242),
        ("llama-3.1-8b", HEAD, 300),
        ("llama-3.1-8b", HEAD | {"topk": 4}, 302),
        ("qwen3-30b-a3b", {"algorithm": "off"}, 226),
    ],
)
def test_graphs_hold_what_was_measured_on_an_h200(
    model: str, asked: dict[str, object], measured: int
) -> None:
    """`benchmarks/memory_budget.py` with torch 2.11; a change of a step's tensors may change it."""
    seen, limits, _ = rehearsed(model, H200, "triton", asked)
    assert graphs_held(seen.parts, largest_graphs(limits), H200)[0] == measured * MIB
