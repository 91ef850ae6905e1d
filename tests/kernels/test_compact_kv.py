"""compact_kv: the worked example, and slots moved one by one in plain Python."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._triton.compact_kv import launch_compact_kv
from paceline.kernels.compact_kv import _COMPACT_KV, _compact_kv_cuda, compact_kv
from paceline.runner.recording.recorded import RecordedGraph

Compact = Callable[[list[Tensor], Tensor, Tensor], None]
RUNS = pytest.mark.parametrize("compact", [compact_kv, launch_compact_kv], ids=["op", "triton"])
PAGES, PAGE_SIZE, HEADS = 12, 4, 2
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def make_pool(layers: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Every byte of it tells where it was."""
    pool = torch.empty(layers, PAGES, PAGE_SIZE, HEADS, dim, dtype=dtype)
    size = pool.view(torch.uint8).shape
    generator = torch.Generator().manual_seed(dim)
    pool.view(torch.uint8).copy_(torch.randint(0, 256, size, generator=generator).byte())
    return pool


def slots_of(pool: Tensor) -> Tensor:
    """[layers, slots, bytes]."""
    return pool.view(torch.uint8).view(pool.shape[0], PAGES * PAGE_SIZE, -1)


def make_round(reqs: int, n: int, max_path: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """(slots, paths): scattered slots, the last request padded, paths that end anywhere."""
    source = random.Random(seed)
    slots = source.sample(range(PAGE_SIZE, PAGES * PAGE_SIZE), (reqs - 1) * n) + [0] * n
    paths = []
    for req in range(reqs):
        length = 0 if req == reqs - 1 else source.randrange(1, max_path + 1)
        accepted = [0, *sorted(source.sample(range(1, n), max(length - 1, 0)))]
        paths.append([*accepted, *range(len(accepted), max_path)])
    return torch.tensor(slots).view(reqs, n), torch.tensor(paths)


def moved_by_hand(pools: Sequence[Tensor], loc: Tensor, path: Tensor) -> list[Tensor]:
    """In the order of the path: what a row is written over must have been read."""
    wanted = [pool.clone() for pool in pools]
    for slots in map(slots_of, wanted):
        for req in range(loc.shape[0]):
            for step in range(1, path.shape[1]):
                source, place = loc[req, path[req, step]], loc[req, step]
                slots[:, place] = slots[:, source].clone()
    return wanted


def assert_moved(pools: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for found, expected in zip(pools, wanted, strict=True):
        assert torch.equal(slots_of(found), slots_of(expected))


@RUNS
def test_the_worked_example_moves_two_rows(compact: Compact) -> None:
    pool = torch.arange(PAGES * PAGE_SIZE).view(1, PAGES, PAGE_SIZE, 1, 1).repeat(2, 1, 1, 1, 1)
    compact([pool], torch.tensor([[9, 10, 24, 25]]), torch.tensor([[0, 2, 3]]))
    wanted = list(range(PAGES * PAGE_SIZE))
    wanted[10], wanted[24] = 24, 25
    assert pool.view(2, -1).tolist() == [wanted] * 2


@RUNS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), [(8, 8), (5, 3), (16, 6)])
def test_rows_move_in_every_layer_and_head_to_the_last_byte(
    compact: Compact, dtype: torch.dtype, dim: int, v_dim: int
) -> None:
    loc, path = make_round(3, 6, 4, seed=dim)
    pools = [make_pool(2, size, dtype) for size in (dim, v_dim)]
    wanted = moved_by_hand(pools, loc, path)
    compact(pools, loc, path)
    assert_moved(pools, wanted)


@pytest.mark.parametrize("seed", range(40))
def test_any_ascending_path_moves_as_by_hand(seed: int) -> None:
    n = 2 + seed % 7
    loc, path = make_round(5, n, max(2, n - seed % 3), seed=seed)
    pools = [make_pool(3, 4, torch.bfloat16), make_pool(3, 2, torch.bfloat16)]
    wanted = moved_by_hand(pools, loc, path)
    compact_kv(pools, loc, path)
    assert_moved(pools, wanted)


@pytest.mark.parametrize("dims", [(3,), (300, 7), (4, 4, 4)])
def test_the_kernel_takes_any_number_of_pools_and_slots_wider_than_a_program(
    dims: tuple[int, ...],
) -> None:
    """300 numbers of 4 bytes and 2 heads: three programs of a slot, the last of them cut short."""
    loc, path = make_round(2, 5, 5, seed=1)
    pools = [make_pool(1, dim, torch.float32) for dim in dims]
    wanted = moved_by_hand(pools, loc, path)
    launch_compact_kv(pools, loc, path)
    assert_moved(pools, wanted)


@RUNS
def test_what_lies_together_is_left_alone(compact: Compact) -> None:
    """And so are the roots of rounds that accept nothing."""
    loc = make_round(3, 4, 3, seed=0)[0]
    pools = [make_pool(1, 4, torch.float32)]
    before = [pool.clone() for pool in pools]
    compact(pools, loc, torch.tensor([[0, 1, 2]] * 3))
    compact(pools, loc, torch.tensor([[0]] * 3))
    assert_moved(pools, before)


def test_the_operator_hands_every_argument_to_the_kernel() -> None:
    loc, path = make_round(2, 4, 3, seed=3)
    pools = [make_pool(1, dim, torch.bfloat16) for dim in (4, 8)]
    wanted = moved_by_hand(pools, loc, path)
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("compact_kv", _compact_kv_cuda, "CPU")
        _COMPACT_KV(pools, loc, path)
    assert_moved(pools, wanted)


def test_a_replay_moves_the_path_it_finds() -> None:
    loc, path = make_round(4, 6, 4, seed=5)
    pools = [make_pool(2, 4, torch.float8_e4m3fn), make_pool(2, 8, torch.bfloat16)]
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: compact_kv(pools, loc, path))
    others = make_round(4, 6, 4, seed=6)
    loc.copy_(others[0])
    path.copy_(others[1])
    wanted = moved_by_hand(pools, loc, path)
    graph.replay()
    assert_moved(pools, wanted)


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    loc, path = make_round(2, 4, 3, seed=0)
    pool = make_pool(1, 4, torch.float32)
    with pytest.raises(KernelArgumentError, match=r"pools\[1\] must be contiguous \[layers, num"):
        compact_kv([pool, pool[0]], loc, path)
    with pytest.raises(KernelArgumentError, match=r"pools\[0\] .*; pass a pool's whole tensors"):
        compact_kv([pool.transpose(1, 2)], loc, path)
    with pytest.raises(KernelArgumentError, match=r"loc must be contiguous int64 .*, got int32"):
        compact_kv([pool], loc.int(), path)
    with pytest.raises(KernelArgumentError, match=r"path must be .*, got int64 \[2, 2\] with"):
        compact_kv([pool], loc, path[:, :2])
