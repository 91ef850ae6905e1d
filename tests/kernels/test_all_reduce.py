"""Ranks, here threads, get the ordered sum of their parts, all the same bits, however late one is;
graphs send anew; who does not come is told by name."""

import inspect
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from children import child
from paceline.core.errors import KernelArgumentError, PacelineError
from paceline.kernels import all_reduce as exchanges
from paceline.kernels._triton.all_reduce import launch_all_gather, launch_all_reduce
from paceline.kernels.all_reduce import (
    ABSENT,
    GONE,
    SLICE_BYTES,
    WORDS,
    Exchange,
    ExchangeMemory,
    all_gather,
    all_reduce,
    all_reduce_reference,
    exchange_memory,
    open_exchange,
    peer_table,
)
from paceline.kernels.stand_in import StandIn
from paceline.runner.recording.recorded import RecordedGraph

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_ranks(
    size: int, work: Callable[[Exchange], Tensor], dtype: torch.dtype, capacity: int = 64
) -> list[Tensor]:
    ways = open_exchange(size, capacity, dtype=dtype, device=CPU)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, ways))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_has_the_sum_in_order_whoever_is_late(size: int, dtype: torch.dtype) -> None:
    turns = [torch.randn(size, 5, 7).to(dtype) for _ in range(6)]

    def work(way: Exchange) -> Tensor:
        sums = []
        for turn, parts in enumerate(turns):
            if turn % size == way.rank:
                time.sleep(0.005)
            sums.append(all_reduce(parts[way.rank], way))
        return torch.stack(sums)

    results = on_ranks(size, work, dtype)
    assert all(torch.equal(result, results[0]) for result in results)
    for parts, result in zip(turns, results[0], strict=True):
        wanted = parts[0].float()
        for part in parts[1:]:
            wanted = wanted + part.float()
        assert torch.equal(result, wanted.to(dtype))
        exact = parts.double().sum(0)
        half_ulp = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6
        assert ((result.double() - exact).abs() <= half_ulp * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float32_passes_an_exchange_of_any_dtype_unrounded(dtype: torch.dtype) -> None:
    parts = torch.randn(2, 3, 2)
    between = parts.to(dtype)  # turns of the box's own dtype, before and behind

    def work(way: Exchange) -> Tensor:
        own = between[way.rank]
        sums = [all_reduce(each, way) for each in (own, parts[way.rank], own)]
        assert [each.dtype for each in sums] == [dtype, torch.float32, dtype]
        assert torch.equal(sums[0], sums[2])
        return sums[1]

    for found in on_ranks(2, work, dtype, capacity=12):
        assert torch.equal(found, parts[0] + parts[1])


def test_the_order_of_the_sum_is_that_of_the_ranks() -> None:
    parts = torch.tensor([[1e8], [1.0], [-1e8]])
    assert all_reduce_reference(parts).item() == 0.0
    assert all_reduce_reference(parts[[0, 2, 1]]).item() == 1.0


@pytest.mark.parametrize("columns", [8, 7, 5, 3])
def test_columns_of_all_ranks_lie_side_by_side(columns: int) -> None:
    whole = torch.randn(3, columns)
    most = -(-columns // 4)

    def work(way: Exchange) -> Tensor:
        own = whole[:, way.rank * most : (way.rank + 1) * most]
        return all_gather(own, columns, way)

    for result in on_ranks(4, work, torch.float32):
        assert torch.equal(result, whole)


TURNS = 200
IMPORTS = """import sys
from pathlib import Path
import torch
from torch import Tensor
from paceline.kernels.all_reduce import Exchange, all_reduce
"""


def sums(folder: Path, rank: int) -> list[list[list[float]]]:
    """What a rank gets that reaches the other through files which both map."""
    box = torch.from_file(f"{folder}/box", shared=True, size=2 * 2 * 8).view(2, 2, 8)
    sent = torch.from_file(f"{folder}/sent", shared=True, size=2, dtype=torch.int64)
    rows, peers = torch.empty(0), torch.empty(0, 3, dtype=torch.int64)
    way = Exchange(rank, box, sent, rows, peers)
    return [all_reduce(term(turn, rank), way).tolist() for turn in range(TURNS)]


def term(turn: int, rank: int) -> Tensor:
    return torch.arange(8.0).view(2, 4) * turn + 0.1 * rank


def test_processes_that_map_one_box_are_ranks_as_threads_are(tmp_path: Path) -> None:
    source = "".join(map(inspect.getsource, (sums, term)))
    code = f"{IMPORTS}TURNS = {TURNS}\n{source}\nprint('imported', flush=True)\n"
    code += "print(sums(Path(sys.argv[1]), 1))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with child(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "imported\n"  # whoever waits in a sum spins
        ours = sums(tmp_path, 0)
        theirs, _ = other.communicate(timeout=60)
    assert theirs.strip() == str(ours)
    assert ours == [(term(turn, 0) + term(turn, 1)).tolist() for turn in range(TURNS)]


def test_a_recorded_step_sends_what_is_there_when_it_is_replayed() -> None:
    ways = open_exchange(2, 8, dtype=torch.float32, device=CPU)
    inputs, outs = torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)

    def step(rank: int) -> None:
        outs[rank].copy_(all_reduce(inputs[rank] * 2, ways[rank]))

    graph = RecordedGraph(poison=True)
    runs = [lambda: graph.capture(lambda: step(0)), graph.replay, graph.replay]
    with ThreadPoolExecutor(1) as other:
        for run, value in zip(runs, (1.0, 5.0, 7.0), strict=True):
            inputs[0], inputs[1] = value, 10 * value
            waits = other.submit(step, 1)
            run()
            waits.result()
            assert (outs == 22 * value).all()


def test_a_run_on_the_meta_device_makes_the_result_alone() -> None:
    with StandIn("cpu", None):
        [way, _] = open_exchange(2, 8, dtype=torch.float32, device=torch.device("meta"))
        x = torch.empty(2, 3, device="meta")
        assert all_reduce(x, way).shape == (2, 3)
        assert all_gather(x, 5, way).shape == (2, 5)


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchanges, "WAIT_S", 0.05)
    [way, _] = open_exchange(2, 8, dtype=torch.float32, device=CPU)
    with pytest.raises(TimeoutError) as caught:
        all_reduce(torch.ones(1, 4), way)
    assert str(caught.value) == (
        "messages of each rank after 0.05 s must be 1, got [1, 0]; the rank with the fewest hangs "
        "or has ended: look at its log"
    )


@pytest.mark.parametrize("op", [all_reduce, lambda x, way: all_gather(x, 8, way)])
def test_a_rank_that_has_ended_is_not_waited_for(op: Callable[[Tensor, Exchange], Tensor]) -> None:
    ways = open_exchange(3, 8, dtype=torch.float32, device=CPU)
    ways[0].sent[2] = GONE
    with pytest.raises(PacelineError, match=r"ranks of the model must be running, got \[2\] ended"):
        op(torch.ones(1, 4), ways[0])


MESSAGES = [(3, 500), (1, 1), (2, 2, torch.float32), (9, 700), (1, 7)]  # of 3, 1, 1, 13, 1 channels


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_programs_of_a_gpu_push_slices_and_sum_them_in_order(size: int, dtype: torch.dtype) -> None:
    """One rank behind the other, for the interpreter has one thread: the last gets what the others
    pushed; to those the parts of ranks behind them are given, at the places that the page states.
    """
    made = [memory_of(size, dtype) for _ in range(size)]
    peers = peer_table([memory.addresses for memory in made], CPU)
    turns = torch.zeros(WORDS, dtype=torch.int64)
    for rows, columns, *others in MESSAGES:
        kind = others[0] if others else dtype
        parts = torch.randn(size, rows, columns).to(kind)
        flat = parts.view(size, -1)
        pieces = flat.split(512, dim=1)
        for rank, (box, sent, _) in enumerate(made):
            for sender in range(rank + 1, size):
                for channel, piece in enumerate(pieces):
                    slices = box[turns[channel] % 2, sender].view(kind)
                    first = channel * (SLICE_BYTES // kind.itemsize)
                    slices[first : first + piece.shape[1]] = piece[sender]
                    sent[channel, sender] = turns[channel] + 1
            out = torch.full((rows, columns), float("nan"), dtype=kind)
            launch_all_reduce(parts[rank], rank, box, sent, peers, out)
            assert torch.equal(out, all_reduce_reference(parts))
        turns[: len(pieces)] += 1
        assert all(torch.equal(sent, turns[:, None].expand(-1, size)) for _, sent, _ in made)


@pytest.mark.parametrize("columns", [8, 5, 3])
def test_programs_of_a_gpu_lay_columns_side_by_side(columns: int) -> None:
    """The last rank alone: what the others pushed before it."""
    size, whole = 4, torch.randn(3, columns)
    made = [memory_of(size, torch.float32) for _ in range(size)]
    peers = peer_table([memory.addresses for memory in made], CPU)
    most = -(-columns // size)
    out = torch.full_like(whole, float("nan"))
    for rank, (box, sent, _) in enumerate(made):
        sent[:, rank + 1 :] = 1  # whose part is not compared
        own = whole[:, rank * most : (rank + 1) * most].contiguous()
        launch_all_gather(own, rank, box, sent, peers, out)
        sent[:, rank + 1 :] = 0
    assert torch.equal(out, whole)


def memory_of(size: int, dtype: torch.dtype) -> ExchangeMemory:
    """As `exchange_memory` makes it on a GPU."""
    with StandIn("cuda", None):
        shapes = exchange_memory(size, 0, dtype=dtype, device=torch.device("meta"))
    memory = ExchangeMemory(*(torch.zeros_like(each, device=CPU) for each in shapes))
    memory.rows.view(torch.int8).fill_(ABSENT)
    return memory


@pytest.mark.parametrize(
    "x", [torch.ones(9, 1), torch.ones(4), torch.ones(1, 4, dtype=torch.float16)], ids=str
)
def test_what_the_box_does_not_hold_is_refused(x: Tensor) -> None:
    [way, _] = open_exchange(2, 8, dtype=torch.float32, device=CPU)
    told = r"x must be torch\.float32 .* at most 32 bytes on cpu"
    with pytest.raises(KernelArgumentError, match=told):
        all_reduce(x, way)
    with pytest.raises(KernelArgumentError, match="open the exchange for the largest step"):
        all_gather(x, 8, way)
