"""all_reduce of this engine beside NCCL's on the GPUs of this machine: right first, then time.
Likewise all_reduce_add_rms_norm beside the same as two operations.

    python benchmarks/all_reduce.py --ranks 2 [--torch-one-shot] [--turn-bytes 8192,16384]

A process for each GPU.  Every size is summed with parts that change from call to call, an odd
number of calls a graph, and compared bit by bit with the ordered sum in float32.  Then a graph of
CALLS messages is replayed, and the slowest rank's time of one is told.  The last line is JSON.
--torch-one-shot: torch's, too, through symmetric memory; nothing here uses multicast.
--turn-bytes: the norm's kernel with slices of these sizes, where rows take turns.
"""

import argparse
import json
import math
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import paceline.kernels._triton.all_reduce_norm as launcher
from paceline.kernels.all_reduce import (
    POLLED,
    Exchange,
    all_gather,
    all_reduce,
    all_reduce_reference,
)
from paceline.kernels.all_reduce_norm import all_reduce_add_rms_norm
from paceline.kernels.peer_memory import PeerMemory
from paceline.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from paceline.plan.machine import versions

CALLS = 101  # of a graph
REPLAYS = 15
HIDDEN = 4096
ROWS = (1, 8, 64, 256, 512, 1024, 4096, 8192)
ONE_SHOT_ROWS = 1024  # at most: it has few programs
DTYPE = torch.bfloat16
EPS = 1e-5
CHECKED = [
    (1, 1, DTYPE),
    (3, 4096, DTYPE),
    (2, 2, torch.float32),
    (700, 4096, DTYPE),
    (5, 5120, torch.float32),
    (8192, 4096, DTYPE),
    (1, 4096, DTYPE),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--torch-one-shot", action="store_true")
    parser.add_argument(
        "--turn-bytes", type=lambda text: [int(word) for word in text.split(",")], default=[]
    )
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    mp.spawn(work, (args,), nprocs=args.ranks)  # type: ignore[no-untyped-call]


def work(rank: int, args: argparse.Namespace) -> None:
    ranks = args.ranks
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks)
    memory = PeerMemory(rank, ranks, dtype=DTYPE)
    handles: list[Any] = [None] * ranks
    dist.all_gather_object(handles, memory.handle)
    way = memory.open(handles)
    with torch.inference_mode():
        check(way)
        check_norm(way)
        rows = [measure(rows, way, args) for rows in ROWS]
    if rank == 0:
        names = dict.fromkeys(name for row in rows for name in row if name.endswith("_us"))
        print(f"{'rows':>6}{'KiB':>9}" + "".join(f"{name:>15}" for name in names))
        for row in rows:
            times = "".join(f"{row.get(name, math.nan):>15.2f}" for name in names)
            print(f"{row['rows']:>6}{row['kib']:>9.0f}{times}")
        gpu = torch.cuda.get_device_name()
        print(json.dumps({"gpu": gpu, "ranks": ranks, "versions": versions(), "rows": rows}))
    dist.barrier()
    memory.close()
    dist.destroy_process_group()


def parts_of(rows: int, columns: int, ranks: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[ranks, rows, columns] the same on every rank."""
    make = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(ranks, rows, columns, generator=make, device="cuda").to(dtype)


def check(way: Exchange) -> None:
    """Raises AssertionError where a sum or a row of columns is not the definition's."""
    for seed, (rows, columns, dtype) in enumerate(CHECKED):
        parts = parts_of(rows, columns, way.ranks, seed, dtype)
        x = parts[way.rank].clone()
        outs = [all_reduce(x, way)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs += [all_reduce(x, way) for _ in range(3)]
        for turn in range(1, 4):
            x.copy_(parts[way.rank] * turn)
            graph.replay()
            wanted = all_reduce_reference(parts * turn)
            assert all(torch.equal(out, wanted) for out in outs[1:]), (rows, columns, dtype, turn)
        assert torch.equal(outs[0], all_reduce_reference(parts)), (rows, columns, dtype)
    for rows, columns in ((1, 7), (64, 128256), (3, 32001)):
        whole = parts_of(rows, columns, 1, rows, DTYPE)[0]
        most = -(-columns // way.ranks)
        own = whole[:, way.rank * most : (way.rank + 1) * most].contiguous()
        assert torch.equal(all_gather(own, columns, way), whole), (rows, columns)


def check_norm(way: Exchange) -> None:
    """Raises AssertionError where the stream is not the definition's, or a norm is not near it or
    differs between ranks."""
    rows_of_a_model = [case for case in CHECKED if case[1] > 2]
    for seed, (rows, columns, dtype) in enumerate(rows_of_a_model):
        near = {"rtol": 0.016 if dtype == DTYPE else 1e-5, "atol": 1e-5}
        parts = parts_of(rows, columns, way.ranks, seed, dtype)
        start, weight = parts_of(rows, columns, 2, seed + 100, dtype)[0], parts[0, 0] + 1
        x, stream = parts[way.rank].clone(), start.clone()
        add = partial(all_reduce_add_rms_norm, x, stream, weight, EPS, way)
        outs = [add()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs += [add() for _ in range(3)]
        for turn in range(1, 4):
            x.copy_(parts[way.rank] * turn)
            stream.copy_(start)
            graph.replay()
            wanted, total = start, start
            summed = all_reduce_reference(parts * turn)
            for out in outs[1:]:
                wanted, total = add_rms_norm_reference(summed, total, weight, EPS)
                torch.testing.assert_close(out, wanted, **near)
            assert torch.equal(stream, total), (rows, columns, dtype, turn)
        others = all_gather(outs[-1], columns * way.ranks, way).view(rows, way.ranks, columns)
        assert (others == others[:, :1]).all(), (rows, columns, dtype)


def measure(rows: int, way: Exchange, args: argparse.Namespace) -> dict[str, float]:
    x = torch.randn(rows, HIDDEN, device="cuda").to(DTYPE)
    stream, weight = torch.zeros_like(x), torch.ones_like(x[0])
    few = CALLS if rows <= 1024 else 11
    joined = partial(all_reduce_add_rms_norm, x, stream, weight, EPS, way)
    found = {
        "rows": rows,
        "kib": x.nbytes / 1024,
        "ours_us": timed(partial(all_reduce, x, way), few),
        "norm_us": timed(joined, few),
        "norm_apart_us": timed(lambda: add_rms_norm(all_reduce(x, way), stream, weight, EPS), few),
        "nccl_us": timed(lambda: dist.all_reduce(x), few),
    }
    usual = launcher._TURN_BYTES
    for size in args.turn_bytes if rows > POLLED else ():
        launcher._TURN_BYTES = size
        found[f"norm_{size}_us"] = timed(joined, few)
    launcher._TURN_BYTES = usual
    if args.torch_one_shot and rows <= ONE_SHOT_ROWS:
        found["torch_us"] = timed(one_shot_of(x), few)
    return found


def one_shot_of(x: Tensor) -> Callable[[], Tensor]:
    """torch's sum of a copy of x in symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    copy = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(copy, dist.group.WORLD)
    copy.copy_(x)
    return partial(torch.ops.symm_mem.one_shot_all_reduce, copy, "sum", dist.group.WORLD.group_name)


def timed(call: Any, calls: int) -> float:
    """Microseconds of a call, of the slowest rank: the median of replays."""
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    found = []
    for _ in range(REPLAYS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / calls)
    slowest = torch.tensor(median(found[3:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()
