"""Sums over ranks beside products: does a prefill gain where rows are summed while others are still
multiplied?

    python benchmarks/overlapped_sums.py --ranks 2

A process for each GPU.  What stands between two attentions of a layer (Llama-3.1-8B's shape: back
to the stream, sum and norm, feed-forward, sum and norm, to heads) runs LAYERS times over a step of
prompts: as it is, and cut into chunks of rows, whose sums have a stream of their own.  `joined`
waits for all chunks of a sum, `through` goes on with each.  programs: how many the kernel of a sum
may have, which share the processors with products.  The last line is JSON.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import paceline.kernels._triton.all_reduce_norm as launcher
from paceline.kernels.act_and_mul import act_and_mul
from paceline.kernels.all_reduce import CHANNELS, Exchange
from paceline.kernels.all_reduce_norm import all_reduce_add_rms_norm
from paceline.kernels.peer_memory import PeerMemory
from paceline.plan.machine import versions

DTYPE = torch.bfloat16
HIDDEN, HEADS, KV_HEADS, INNER = 4096, 4096, 2048, 14336  # columns, of all ranks
LAYERS = 8
REPEATS = 7
EPS = 1e-5
TOKENS = (1024, 8192)
PROGRAMS = (16, 32, 64, CHANNELS)
CHUNKS = (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29578")
    mp.spawn(work, (ranks,), nprocs=ranks)  # type: ignore[no-untyped-call]


def work(rank: int, ranks: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    memory = PeerMemory(rank, ranks, dtype=DTYPE)
    handles: list[Any] = [None] * ranks
    dist.all_gather_object(handles, memory.handle)
    way = memory.open(handles)
    with torch.inference_mode():
        rows = [row for tokens in TOKENS for row in measure(tokens, way)]
    if rank == 0:
        gpu = torch.cuda.get_device_name()
        print(json.dumps({"gpu": gpu, "ranks": ranks, "versions": versions(), "rows": rows}))
    dist.barrier()
    memory.close()
    dist.destroy_process_group()


class Layer:
    """The weights of one rank, and the step's rows."""

    def __init__(self, tokens: int, way: Exchange) -> None:
        def weight(out: int, columns: int) -> Tensor:
            return torch.randn(out, columns, generator=make, device="cuda").to(DTYPE) * 0.02

        make = torch.Generator("cuda").manual_seed(way.rank)
        n = way.ranks
        self.way = way
        self.back = weight(HIDDEN, HEADS // n)
        self.gate_up = weight(2 * INNER // n, HIDDEN)
        self.down = weight(HIDDEN, INNER // n)
        self.to_heads = weight((HEADS + KV_HEADS) // n, HIDDEN)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=DTYPE)
        self.attended = weight(tokens, HEADS // n)
        self.stream = torch.zeros(tokens, HIDDEN, device="cuda", dtype=DTYPE)
        self.aside = torch.cuda.Stream(priority=-1)

    def sum(self, part: Tensor, stream: Tensor) -> Tensor:
        return all_reduce_add_rms_norm(part, stream, self.norm, EPS, self.way)

    def feed(self, x: Tensor) -> Tensor:
        return F.linear(act_and_mul(F.linear(x, self.gate_up), "silu"), self.down)

    def plain(self) -> Tensor:
        x = self.sum(F.linear(self.attended, self.back), self.stream)
        return F.linear(self.sum(self.feed(x), self.stream), self.to_heads)

    def joined(self, chunks: int) -> Tensor:
        """A sum's chunks beside the product that makes the next of them."""
        x = torch.cat([each() for each in self._summed(self._back(chunks), chunks)])
        inner = act_and_mul(F.linear(x, self.gate_up), "silu")
        parts = (F.linear(rows, self.down) for rows in inner.chunk(chunks))
        return F.linear(torch.cat([each() for each in self._summed(parts, chunks)]), self.to_heads)

    def through(self, chunks: int) -> Tensor:
        """A chunk goes on as soon as its sum is there."""
        first = self._summed(self._back(chunks), chunks)
        second = self._summed((self.feed(each()) for each in first), chunks)
        return torch.cat([F.linear(each(), self.to_heads) for each in second])

    def _back(self, chunks: int) -> Iterator[Tensor]:
        return (F.linear(rows, self.back) for rows in self.attended.chunk(chunks))

    def _summed(self, parts: Iterator[Tensor], chunks: int) -> list[Callable[[], Tensor]]:
        """Of each part what waits for its normed sum, which is made aside."""
        here = torch.cuda.current_stream()
        return [
            self._sum_aside(part, stream, here)
            for part, stream in zip(parts, self.stream.chunk(chunks), strict=True)
        ]

    def _sum_aside(
        self, part: Tensor, stream: Tensor, here: torch.cuda.Stream
    ) -> Callable[[], Tensor]:
        self.aside.wait_stream(here)
        with torch.cuda.stream(self.aside):
            out = self.sum(part, stream)
            done = self.aside.record_event()
        part.record_stream(self.aside)
        out.record_stream(here)

        def wait() -> Tensor:
            here.wait_event(done)
            return out

        return wait


def measure(tokens: int, way: Exchange) -> list[dict[str, Any]]:
    """A row of each variant: microseconds of a layer, of the slowest rank."""
    layer, rows = Layer(tokens, way), []
    product_us = timed(lambda: (F.linear(layer.attended, layer.back), layer.feed(layer.stream)))
    variants: list[tuple[str, int, Callable[[], Tensor]]] = [("plain", 1, layer.plain)]
    for chunks in CHUNKS:
        variants.append(("joined", chunks, lambda chunks=chunks: layer.joined(chunks)))  # type: ignore[misc]
        variants.append(("through", chunks, lambda chunks=chunks: layer.through(chunks)))  # type: ignore[misc]
    layer.stream.zero_()
    wanted = layer.plain()
    for name, chunks, call in variants:
        for programs in PROGRAMS:
            launcher.CHANNELS = programs  # type: ignore[attr-defined,misc]
            layer.stream.zero_()
            torch.testing.assert_close(call(), wanted, rtol=0.05, atol=0.05)
            row = {
                "tokens": tokens,
                "variant": name,
                "chunks": chunks,
                "programs": programs,
                "layer_us": timed(call),
            }
            rows.append(row)
            if way.rank == 0:
                print(*row.values(), flush=True)
    launcher.CHANNELS = CHANNELS  # type: ignore[attr-defined,misc]
    if way.rank == 0:
        print(f"{tokens} tokens: both blocks without sums {product_us:.0f} us", flush=True)
    return rows


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of a call, of the slowest rank: the median of repeats."""
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(LAYERS):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / LAYERS)
    slowest = torch.tensor(median(found[2:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 1)


if __name__ == "__main__":
    main()
