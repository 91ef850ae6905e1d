"""The ranks' sum, joined with the addition and the norm behind it, is what one behind the other
gives: on threads, and of the program that a GPU runs."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from test_all_reduce import memory_of
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels import all_reduce_norm as joined
from paceline.kernels._triton import all_reduce_norm as kernels
from paceline.kernels.all_reduce import (
    ABSENT,
    CHANNELS,
    SLICE_BYTES,
    Exchange,
    ExchangeMemory,
    all_reduce,
    open_exchange,
    peer_table,
)
from paceline.kernels.all_reduce_norm import (
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_reference,
)
from paceline.kernels.rms_norm import add_rms_norm
from paceline.kernels.stand_in import StandIn

CPU = torch.device("cpu")
EPS = 1e-5
KINDS = {"plain": {}, "offset": {"unit_offset": True}, "wide": {"wide": True}}


class Case(NamedTuple):
    parts: Tensor  # [ranks, 3, dim]
    residual: Tensor  # [3, dim]
    weight: Tensor  # [dim]

    def reference(self, kind: str) -> tuple[Tensor, Tensor]:
        return all_reduce_add_rms_norm_reference(*self, EPS, **KINDS[kind])


def made(size: int, dim: int, dtype: torch.dtype) -> Case:
    torch.manual_seed(dim)
    parts, residual = torch.randn(size, 3, dim), torch.randn(3, dim)
    return Case(parts.to(dtype), residual.to(dtype), (torch.rand(dim) + 0.5).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_get_what_a_sum_and_a_norm_behind_it_give(kind: str) -> None:
    case = made(3, 40, torch.bfloat16)
    parts, residual, weight = case
    ways = open_exchange(3, 120, dtype=torch.bfloat16, device=CPU)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        stream = residual.clone()
        own = parts[rank]
        out = all_reduce_add_rms_norm(own, stream, weight, EPS, ways[rank], **KINDS[kind])
        again = residual.clone()
        wanted = add_rms_norm(all_reduce(own, ways[rank]), again, weight, EPS, **KINDS[kind])
        assert torch.equal(out, wanted)
        assert torch.equal(stream, again)
        return out, stream

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(work, range(3)))
    normed, total = case.reference(kind)
    for out, stream in found:
        assert torch.equal(stream, total)
        torch.testing.assert_close(out, normed, atol=0.02, rtol=0.01)


def launched(
    case: Case, memories: list[ExchangeMemory], rank: int, kind: str
) -> tuple[Tensor, Tensor]:
    """(norm, stream) of a rank that runs the kernel."""
    peers = peer_table([memory.addresses for memory in memories], CPU)
    flags = [KINDS[kind].get(name, False) for name in ("unit_offset", "wide")]
    stream, out = case.residual.clone(), torch.full_like(case.residual, float("nan"))
    kernels.launch_all_reduce_norm(
        case.parts[rank], stream, case.weight, EPS, *flags, rank, *memories[rank], peers, out
    )
    return out, stream


ROWS = {1: [(0, 0, 0), (1, 0, 0), (0, 1, 0)], 2: [(0, 0, 0), (0, 0, 1), (1, 0, 0)]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float16), (2, torch.float32)], ids=str)
def test_a_program_of_a_gpu_sums_adds_and_normalises_rows(
    kind: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank behind the other, as in `test_all_reduce`; three rows for two programs, twice.
    rows: of a slice; ROWS: channel, turn and place of each."""
    size, dim, block = 2, 40, 64
    monkeypatch.setattr(kernels, "CHANNELS", 2)
    monkeypatch.setattr(kernels, "POLLED", 0)
    monkeypatch.setattr(kernels, "_TURN_BYTES", rows * block * dtype.itemsize)
    case = made(size, dim, dtype)
    memories = [memory_of(size, dtype) for _ in range(size)]
    wanted, total = case.reference(kind)
    turns = torch.zeros(2, dtype=torch.int64)
    for _ in range(2):
        passed = torch.tensor(
            [len({turn for at, turn, _ in ROWS[rows] if at == c}) for c in (0, 1)]
        )
        for rank, memory in enumerate(memories):
            for sender in range(rank + 1, size):
                for row, (channel, turn, slot) in enumerate(ROWS[rows]):
                    side = memory.box[(turns[channel] + turn) % 2, sender]
                    first = channel * (SLICE_BYTES // dtype.itemsize) + slot * block
                    side[first : first + dim] = case.parts[sender, row]
                memory.sent[:2, sender] = turns + passed
            out, stream = launched(case, memories, rank, kind)
            assert torch.equal(stream, total)
            torch.testing.assert_close(out, wanted)
        turns += passed
        for memory in memories:
            assert torch.equal(memory.sent[:2], turns[:, None].expand(-1, size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_that_nobody_announces_are_taken_as_they_come(dtype: torch.dtype) -> None:
    """As above, of three ranks; a number that looks as if it had not come is another NaN."""
    size, dim = 3, 40
    case = made(size, dim, dtype)
    case.parts[0, 1, 7:9].view(torch.int8).fill_(ABSENT)
    memories = [memory_of(size, dtype) for _ in range(size)]
    wanted, total = case.reference("plain")
    for turn in range(3):
        for rank, memory in enumerate(memories):
            for sender in range(rank + 1, size):
                memory.rows[turn % 2, sender, :3, :dim] = case.parts[sender]
            out, stream = launched(case, memories, rank, "plain")
            torch.testing.assert_close(stream, total, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(out, wanted, equal_nan=True)
            assert memory.sent[CHANNELS : CHANNELS + 4, rank].tolist() == [turn + 1] * 3 + [0]
            assert (memory.rows[turn % 2, :, :3, :dim].view(torch.int8) == ABSENT).all()


@pytest.mark.parametrize(("dim", "sums"), [(SLICE_BYTES // 4, 0), (SLICE_BYTES // 4 + 8, 1)])
def test_a_gpu_joins_them_where_a_row_is_a_slice(
    dim: int, sums: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []

    def told(x: Tensor, way: Exchange) -> Tensor:
        alone.append(x)
        return x

    monkeypatch.setattr(joined, "all_reduce", told)
    meta = torch.device("meta")
    with StandIn("cuda", None):
        [way, _] = open_exchange(2, 8, dtype=torch.float32, device=meta)
        x, weight = torch.empty(2, dim, device=meta), torch.empty(dim, device=meta)
        assert all_reduce_add_rms_norm(x, x, weight, EPS, way).shape == x.shape
    assert len(alone) == sums


def test_a_stream_of_another_shape_is_refused() -> None:
    meta = torch.device("meta")
    with StandIn("cuda", None):
        [way, _] = open_exchange(2, 8, dtype=torch.float32, device=meta)
        x, weight = torch.empty(2, 8, device=meta), torch.empty(8, device=meta)
        with pytest.raises(KernelArgumentError, match=r"residual must be .*\[2, 8\]"):
            all_reduce_add_rms_norm(x, x[:1], weight, EPS, way)
