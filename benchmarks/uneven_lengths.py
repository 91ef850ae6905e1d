"""What do requests of uneven lengths cost beside even ones, and steps of prompts and decodes beside
what they must read and multiply?

    PYTHONPATH=src python benchmarks/uneven_lengths.py

Llama-3.1-8B's shape (32 heads, 8 KV heads of 128), bfloat16, pages of 16, our kernels, in CUDA
graphs of layers that exceed the L2 cache.  Decodes: attention of one layer, with lengths
log-uniform between two bounds, and with the same keys spread evenly.  Mixed steps: one whole layer,
its products alone, and the time of reading its keys at --bandwidth.  Some tokens are compared with
the definition first.  A table for people, then one JSON document as the last line.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.bench.interleaved import time_interleaved
from paceline.kernels.linear import gated_linear, linear
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    SplitWorkspace,
    Weighing,
    paged_attention_reference,
    paged_decode,
    paged_extend,
    split_workspace,
)
from paceline.kernels.rms_norm import add_rms_norm
from paceline.kernels.rope import Rope
from paceline.kernels.rope_write_kv import KVSlots, rope_write_kv
from paceline.kernels.skinny_linear import arrival_counters
from paceline.plan.machine import local_device, versions

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
HIDDEN, INTER = 4096, 14336
PRODUCTS = ((HIDDEN + 2 * KV_HEADS * DIM, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INTER))
LAYERS = 6
ERROR_LIMIT = 2.0  # times the error of the definition in bfloat16, and one rounding
CHECKED = 3  # requests that are compared with the definition
DTYPE = torch.bfloat16
DECODES = ((80, 64, 16_384), (80, 256, 4096), (24, 64, 16_384), (200, 64, 4096))
MIXED = ((240, 500, (528,)), (120, 500, (392,)), (240, 500, (1808,)), (200, 500, (56,)))


def log_uniform(count: int, least: int, most: int) -> list[int]:
    """Lengths, one from each equal share of the distribution, in random order."""
    source = random.Random(0)
    low, high = math.log(least), math.log(most)
    found = [round(math.exp(low + (high - low) * (i + 0.5) / count)) for i in range(count)]
    source.shuffle(found)
    return found


class World:
    """The pages of requests, whose last tokens a step computes."""

    def __init__(self, kv_lens: Sequence[int], extends: Sequence[int], device: Any) -> None:
        held = [-(-length // PAGE) for length in kv_lens]
        order = 1 + torch.randperm(sum(held), generator=torch.Generator().manual_seed(0))
        table = torch.zeros(len(held), max(held), dtype=torch.int32)
        for row, pages in enumerate(order.split(held)):
            table[row, : len(pages)] = pages
        self.tokens, self.keys = sum(extends), sum(kv_lens)
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        news = torch.tensor(extends, dtype=torch.int32)
        starts = torch.zeros(len(held) + 1, dtype=torch.int32)
        starts[1:] = news.cumsum(0)
        at = torch.cat([torch.arange(k - e, k) for k, e in zip(kv_lens, extends, strict=True)])
        req = torch.arange(len(held)).repeat_interleave(news)
        self.loc = (table[req, at // PAGE].long() * PAGE + at % PAGE).to(device)
        self.positions = at.to(device)
        on = [each.to(device) for each in (table, lens - news, lens, starts)]
        self.rows = PagedRows(*on, max(extends))
        shape = (LAYERS, 2, sum(held) + 1, PAGE, KV_HEADS, DIM)
        self.pool = torch.randn(shape, device=device, dtype=DTYPE)
        self.workspace: SplitWorkspace = split_workspace(
            len(held), [(HEADS, KV_HEADS)], v_head_dim=DIM, device=device
        )
        self.out = torch.empty(self.tokens, HEADS, DIM, device=device, dtype=DTYPE)
        self.lse = torch.empty(self.tokens, HEADS, device=device)

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """q: [tokens, HEADS, DIM] -> the same shape, overwritten by the next call."""
        cache, weighing = PagedCache(*self.pool[layer]), Weighing(DIM**-0.5)
        call = PagedCall(q, cache, self.rows, weighing, self.out, self.lse)
        if self.rows.max_extend_len == 1:
            paged_decode(call, self.workspace)
        else:
            paged_extend(call, self.workspace)
        return self.out

    def worst_error(self, q: Tensor) -> float:
        """The largest error of the last requests, in units of bfloat16's own and a rounding."""
        found, rows = self.attend(q, 0).double(), self.rows
        first = int(rows.cu_seqlens_q[-1 - CHECKED])
        some = PagedRows(
            rows.page_table[-CHECKED:],
            rows.prefix_lens[-CHECKED:],
            rows.kv_lens[-CHECKED:],
            rows.cu_seqlens_q[-1 - CHECKED :] - first,
            rows.max_extend_len,
        )
        cache, weighing = PagedCache(*self.pool[0]), Weighing(DIM**-0.5)
        exact, plain = (
            paged_attention_reference(q[first:], cache, some, weighing, compute_dtype=dtype)[0]
            for dtype in (torch.float64, DTYPE)
        )
        own = (plain.double() - exact).abs().amax()
        rounding = torch.finfo(DTYPE).eps * exact.abs().amax()
        return float((found[first:] - exact).abs().amax() / (own + rounding))


class Layer:
    """Norms, products, rotation, attention and activation of a step, over LAYERS layers."""

    def __init__(self, world: World, device: torch.device) -> None:
        def weight(rows: int, inner: int) -> Tensor:
            return (torch.randn(rows, inner, device=device) * inner**-0.5).to(DTYPE)

        self.world = world
        self.products = [[weight(*shape) for shape in PRODUCTS] for _ in range(LAYERS)]
        self.gate_up = [weight(2 * INTER, HIDDEN) for _ in range(LAYERS)]
        self.counters = arrival_counters(2 * INTER, device=device)
        self.norm = torch.ones(HIDDEN, dtype=DTYPE, device=device)
        self.table = torch.randn(32_768, DIM, device=device)
        self.x = torch.randn(world.tokens, HIDDEN, device=device).to(DTYPE)
        self.wide = torch.randn(world.tokens, INTER, device=device).to(DTYPE)
        self.residual = torch.zeros_like(self.x)

    def alone(self, index: int) -> Tensor:
        """The four products."""
        qkv, out, down = self.products[index]
        linear(self.x, qkv, None, counters=self.counters)
        linear(self.x, out, None, counters=self.counters)
        linear(self.x, self.gate_up[index], None, counters=self.counters)
        return linear(self.wide, down, None, counters=self.counters)

    def whole(self, index: int) -> Tensor:
        """All of it."""
        qkv, out, down = self.products[index]
        world = self.world
        x = add_rms_norm(self.x, self.residual, self.norm, 1e-5)
        rows = linear(x, qkv, None, counters=self.counters).view(world.tokens, -1, DIM)
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        into = KVSlots(*world.pool[index], world.loc, None, None)
        rope_write_kv(q, k, v, into=into, rope=Rope(self.table, world.positions), norms=None)
        x = linear(world.attend(q, index).flatten(1), out, None, counters=self.counters)
        x = add_rms_norm(x, self.residual, self.norm, 1e-5)
        x = gated_linear(x, self.gate_up[index], None, "silu")
        return linear(x, down, None, counters=self.counters)


def decode(case: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    """Microseconds of a layer's attention, by length."""
    lens = log_uniform(*case)
    keys, count = sum(lens), len(lens)
    even = [keys // count + (row < keys % count) for row in range(count)]
    worlds = {"uneven": World(lens, [1] * count, device), "even": World(even, [1] * count, device)}
    q = torch.randn(count, HEADS, DIM, device=device).to(DTYPE)
    errors = {name: world.worst_error(q) for name, world in worlds.items()}
    runs = {name: lambda at, world=world: world.attend(q, at) for name, world in worlds.items()}
    timed = time_interleaved(runs, layers=LAYERS, device=device)
    us = {name: 1e6 * timing.median_s for name, timing in timed.items()}
    print(
        f"decode of {count} requests, {case[1]} to {case[2]} keys, {keys} in all: uneven "
        f"{us['uneven']:.1f} us, even {us['even']:.1f}, ratio {us['uneven'] / us['even']:.3f}, "
        f"errors {errors}",
        flush=True,
    )
    return {"requests": count, "between": case[1:], "keys": keys, "us": us, "errors": errors}


def mixed(
    case: tuple[int, int, tuple[int, ...]], device: torch.device, bandwidth: float
) -> dict[str, Any]:
    """Microseconds of a layer, of its products, and of reading its keys."""
    decodes, keys, prompts = case
    lens = [keys - decodes // 2 + row for row in range(decodes)] + list(prompts)
    world = World(lens, [1] * decodes + list(prompts), device)
    layer = Layer(world, device)
    q = torch.randn(world.tokens, HEADS, DIM, device=device).to(DTYPE)
    error = world.worst_error(q)
    runs = {
        "layer": layer.whole,
        "products": layer.alone,
        "attention": lambda at: world.attend(q, at),
    }
    timed = time_interleaved(runs, layers=LAYERS, device=device)
    us = {name: 1e6 * timing.median_s for name, timing in timed.items()}
    us["keys"] = 1e6 * world.keys * 2 * KV_HEADS * DIM * 2 / bandwidth
    ratio = us["layer"] / (us["products"] + us["keys"])
    print(
        f"step of {world.tokens} tokens, {decodes} decodes of about {keys} keys: layer "
        f"{us['layer']:.1f} us, products {us['products']:.1f}, keys {us['keys']:.1f}, attention "
        f"{us['attention']:.1f}, ratio {ratio:.3f}, error {error:.2f}",
        flush=True,
    )
    return {
        "decodes": decodes,
        "keys": keys,
        "prompts": prompts,
        "us": us,
        "ratio": ratio,
        "error": error,
    }


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bandwidth", type=float, default=4.23e12, help="of reading.  [bytes/s]")
    bandwidth = parser.parse_args().bandwidth
    facts = local_device("cuda")
    device = torch.device("cuda")
    decodes = [decode(case, device) for case in DECODES]
    steps = [mixed(case, device, bandwidth) for case in MIXED]
    document = {
        "benchmark": "uneven_lengths",
        "device": facts.name,
        "versions": versions(),
        "bandwidth": bandwidth,
        "decodes": decodes,
        "mixed": steps,
    }
    print(json.dumps(document))
    errors = [e for row in decodes for e in row["errors"].values()] + [r["error"] for r in steps]
    return int(max(errors) > ERROR_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
