"""What do FlashAttention 3's pages of 16 tokens cost beside longer ones, and what does it gain of
codes?

    PYTHONPATH=src python benchmarks/fa3_caches.py

Llama-3.1-8B's attention (32 heads, 8 KV heads of 128), one layer, in CUDA graphs of three, whose
keys lie in the L2 cache where requests are few and short: the library by its pages, and with
queries, keys and values all in fp8 e4m3, which is how it reads such a cache; our kernels with
queries in bfloat16 over both caches.  Each is compared with the definition in float64 over the
cache that it reads, its queries as given: the error is that of the last tokens over the
definition's own in bfloat16, and one above ERROR_LIMIT ends with 1.  A table for people, then one
JSON document as the last line.  Needs a build of FlashAttention 3 (`paceline[fa3]`).
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.attention.backends.fa3_backend import FlashAttention3Backend
from paceline.bench.backends import TIMED_VERSIONS
from paceline.bench.interleaved import time_interleaved
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    Weighing,
    paged_attention_reference,
    paged_decode,
    paged_extend,
    split_workspace,
)
from paceline.plan.machine import installed, local_device

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 3
SCALE = DIM**-0.5
DTYPE, CODES = torch.bfloat16, torch.float8_e4m3fn
ERROR_LIMIT = 4.0
CHECKED = 4  # tokens of the last request that are compared with the definition
# (requests, keys of each, new tokens of each)
SHAPES = (
    (1, 1024, 1),
    (64, 4096, 1),
    (1, 1024, 1024),
    (8, 1024, 1024),
    (1, 8192, 8192),
    (1, 9216, 1024),
)
PAGES = (16, 64, 128)


class World:
    """Requests of one shape, in pages in random order, in bfloat16 and as codes."""

    def __init__(self, shape: tuple[int, int, int], page_size: int, device: torch.device) -> None:
        count, keys, new = shape
        source = torch.Generator(device).manual_seed(0)
        held = -(-keys // page_size)
        order = 1 + torch.randperm(count * held, generator=source, device=device)
        table = order.view(count, held).to(torch.int32)
        lens = torch.full((count,), keys, dtype=torch.int32, device=device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device) * new
        self.rows = PagedRows(table, lens - new, lens, starts, new)
        pool = (LAYERS, 2, count * held + 1, page_size, KV_HEADS, DIM)
        self.pool = torch.randn(pool, generator=source, device=device).to(DTYPE)
        self.codes = self.pool.to(CODES)
        self.q = torch.randn(count * new, HEADS, DIM, generator=source, device=device).to(DTYPE)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(count * new, HEADS, device=device)
        self.workspace = split_workspace(count, [(HEADS, KV_HEADS)], v_head_dim=DIM, device=device)

    def ours(self, pool: Tensor, layer: int) -> Tensor:
        """[tokens, HEADS, DIM] by our kernels; pool: `self.pool`, or `self.codes`."""
        one = torch.ones(1, device=pool.device) if pool.dtype == CODES else None
        keys, values = pool[layer]
        cache = PagedCache(keys, values, one, one)
        call = PagedCall(self.q, cache, self.rows, Weighing(SCALE), self.out, self.lse)
        attend = paged_decode if self.rows.max_extend_len == 1 else paged_extend
        attend(call, self.workspace)
        return self.out

    def theirs(self, library: Any, q: Tensor, pool: Tensor, layer: int) -> Tensor:
        """[tokens, HEADS, DIM] by the library; q: in the dtype of pool."""
        rows, scales = self.rows, {}
        if pool.dtype == CODES:
            one = torch.ones(len(rows.kv_lens), KV_HEADS, device=q.device)
            scales = {"q_descale": one, "k_descale": one, "v_descale": one}
        found: Tensor = library.flash_attn_with_kvcache(
            q,
            *pool[layer],
            cache_seqlens=rows.kv_lens,
            page_table=rows.page_table,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_extend_len,
            softmax_scale=SCALE,
            causal=True,
            **scales,
        )
        return found

    def error(self, found: Tensor, pool: Tensor) -> float:
        """Of the last request's last tokens, over that of the definition in bfloat16."""
        rows, few = self.rows, min(CHECKED, self.rows.max_extend_len)
        starts = torch.tensor([0, few], dtype=torch.int32, device=found.device)
        lens = rows.kv_lens[-1:]
        some = PagedRows(rows.page_table[-1:], lens - few, lens, starts, few)
        keys, values = pool[0].to(DTYPE)
        cache = PagedCache(keys, values)
        exact, plain = (
            paged_attention_reference(
                self.q[-few:], cache, some, Weighing(SCALE), compute_dtype=dtype
            )[0]
            for dtype in (torch.float64, DTYPE)
        )
        own = (plain.double() - exact).abs().amax()
        return float((found[-few:].double() - exact).abs().amax() / own)


def measure(shape: tuple[int, int, int], library: Any, device: torch.device) -> dict[str, Any]:
    """Microseconds of one layer and errors, by who attends over what."""
    runs: dict[str, Callable[[int], Tensor]] = {}
    errors = {}
    for page_size in PAGES:
        world = World(shape, page_size, device)
        coded_q = world.q.to(CODES)
        for name, pool, q in (("", world.pool, world.q), (" fp8", world.codes, coded_q)):
            name = f"pages of {page_size}{name}"
            runs[f"fa3, {name}"] = partial(world.theirs, library, q, pool)
            runs[f"triton, {name}"] = partial(world.ours, pool)
            for who in ("fa3", "triton"):
                errors[f"{who}, {name}"] = world.error(runs[f"{who}, {name}"](0), pool)
    timed = time_interleaved(runs, layers=LAYERS, device=device)
    us = {name: 1e6 * timing.median_s for name, timing in timed.items()}
    count, keys, new = shape
    print(f"{count} requests of {keys} keys, {new} of them new")
    for name in runs:
        print(f"    {name:<26}{us[name]:>9.1f} us   error {errors[name]:.2f}", flush=True)
    return {"requests": count, "keys": keys, "new": new, "us": us, "errors": errors}


@torch.inference_mode()
def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    facts, device = local_device("cuda"), torch.device("cuda")
    library = FlashAttention3Backend().import_library()
    rows = [measure(shape, library, device) for shape in SHAPES]
    document = {
        "benchmark": "fa3_caches",
        "device": facts.name,
        "versions": installed(TIMED_VERSIONS),
    }
    print(json.dumps(document | {"rows": rows}))
    return int(max(error for row in rows for error in row["errors"].values()) > ERROR_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
