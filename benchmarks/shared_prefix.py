"""What does a decode gain that reads a shared prefix once for several requests?

    PYTHONPATH=src python benchmarks/shared_prefix.py

One layer of Llama-3.1-8B's attention (32 heads, 8 KV heads of 128), bfloat16, pages of 16, our
decode kernel with each request reading all its keys, and with what `find_shared` found, in turns,
in CUDA graphs of layers that exceed the L2 cache.  First the two must agree with the definition in
float64.  `find_us` is paid once a step, not in each layer.  A table for people, then one JSON
document as the last line.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.bench.interleaved import time_interleaved
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    SharedPrefixes,
    Weighing,
    find_shared,
    paged_attention_reference,
    paged_decode,
    shared_prefixes,
    sharing_rule,
    split_workspace,
)
from paceline.plan.machine import local_device, versions

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MAX_LEN = 20_480
LAYERS = 8
CHECKED = 4  # requests that are compared with the definition
ERROR_LIMIT = 2.0  # times the error of the definition in bfloat16, and one rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests in groups of equal size; each group shares a prefix."""

    groups: int
    of_each: int
    shared: int  # keys, whole pages
    own: tuple[int, ...]  # keys of each request behind them, by turns

    @property
    def reqs(self) -> int:
        return self.groups * self.of_each

    def lens(self) -> list[int]:
        """[reqs] keys."""
        return [self.shared + self.own[i % len(self.own)] for i in range(self.reqs)]


MIXED = tuple(60 + 97 * turn * turn % 1900 for turn in range(37))
CASES = (
    Case(groups=1, of_each=256, shared=2048, own=tuple(range(64, 96))),
    Case(groups=1, of_each=256, shared=1024, own=MIXED),
    Case(groups=4, of_each=64, shared=1024, own=(200, 210)),
    Case(groups=16, of_each=16, shared=1024, own=(200, 210)),
    Case(groups=1, of_each=64, shared=2048, own=(100, 130)),
    Case(groups=1, of_each=64, shared=512, own=(1000, 900)),
    Case(groups=1, of_each=16, shared=2048, own=(100, 130)),
    Case(groups=256, of_each=1, shared=0, own=tuple(range(200, 300))),
    Case(groups=64, of_each=1, shared=0, own=tuple(range(1100, 1200))),
)


def page_table(case: Case) -> tuple[Tensor, int]:
    """([reqs, max_pages] int32, pages of the pool), pages in random order, page 0 nobody's."""
    width, next_page = MAX_LEN // PAGE, 1
    table = torch.zeros(case.reqs, width, dtype=torch.int32)
    prefix = case.shared // PAGE
    for request, length in enumerate(case.lens()):
        first = request - request % case.of_each
        held = -(-length // PAGE)
        table[request, :prefix] = table[first, :prefix]
        start = 0 if request == first else prefix
        table[request, start:held] = torch.arange(next_page, next_page + held - start)
        next_page += held - start
    order = 1 + torch.randperm(next_page - 1, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([torch.zeros(1, dtype=torch.int64), order])[table.long()]
    return shuffled.int(), next_page


def worst_error(call: PagedCall) -> float:
    """The largest error of some tokens, in units of bfloat16's own and a rounding."""
    q, cache, rows, weighing, out, _ = call
    some = PagedRows(
        rows.page_table[:CHECKED],
        rows.prefix_lens[:CHECKED],
        rows.kv_lens[:CHECKED],
        rows.cu_seqlens_q[: CHECKED + 1],
        1,
    )
    exact, plain = (
        paged_attention_reference(q[:CHECKED], cache, some, weighing, compute_dtype=dtype)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    own = (plain.double() - exact).abs().amax(dim=(1, 2))
    rounding = torch.finfo(torch.bfloat16).eps * exact.abs().amax(dim=(1, 2))
    error = (out[:CHECKED].double() - exact).abs().amax(dim=(1, 2))
    return float((error / (own + rounding)).max())


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """One row: microseconds of a layer, plain and shared, and of what a step looks for."""
    table, num_pages = page_table(case)
    torch.manual_seed(0)
    shape = (LAYERS, 2, num_pages, PAGE, KV_HEADS, DIM)
    pool = torch.randn(shape, device=device, dtype=torch.bfloat16)
    q = torch.randn(case.reqs, HEADS, DIM, device=device, dtype=torch.bfloat16)
    lens = torch.tensor(case.lens(), dtype=torch.int32, device=device)
    starts = torch.arange(case.reqs + 1, dtype=torch.int32, device=device)
    rows = PagedRows(table.to(device), lens - 1, lens, starts, 1)
    workspace = split_workspace(
        case.reqs,
        [(HEADS, KV_HEADS)],
        v_head_dim=DIM,
        device=device,
        shares_prefixes=True,
    )
    found, rule = shared_prefixes(case.reqs, device), sharing_rule(HEADS // KV_HEADS, PAGE)
    out, lse = torch.empty_like(q), torch.empty(case.reqs, HEADS, device=device)

    def decode(layer: int, shared: SharedPrefixes | None) -> PagedCall:
        cache = PagedCache(*pool[layer])
        call = PagedCall(q, cache, rows, Weighing(DIM**-0.5), out, lse)
        paged_decode(call, workspace, shared)
        return call

    def find(_: int) -> Tensor:
        find_shared(rows.page_table, lens, found, rule, page_size=PAGE)
        return found.shared_lens

    find(0)
    errors = {
        "plain": worst_error(decode(0, None)),
        "shared": worst_error(decode(0, found)),
    }
    timed = time_interleaved(
        {
            "plain": lambda layer: decode(layer, None).out,
            "shared": lambda layer: decode(layer, found).out,
            "find": find,
        },
        layers=LAYERS,
        device=device,
    )
    us = {name: 1e6 * timing.median_s for name, timing in timed.items()}
    sharers = int((found.shared_lens > 0).sum())
    print(
        f"{case.groups:3d} x {case.of_each:3d} requests, {case.shared:4d} shared: plain "
        f"{us['plain']:6.1f} us, shared {us['shared']:6.1f} ({us['shared'] / us['plain']:.2f}), "
        f"find {us['find']:.1f} a step, {sharers} share, errors {errors}"
    )
    return {
        "groups": case.groups,
        "requests": case.reqs,
        "shared_keys": case.shared,
        "own_keys": [min(case.own), max(case.own)],
        "sharers": sharers,
        "plain_us": us["plain"],
        "shared_us": us["shared"],
        "find_us": us["find"],
        "error": errors,
    }


@torch.inference_mode()
def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    facts = local_device()
    rows = [measure(case, torch.device(facts.device_type)) for case in CASES]
    document = {
        "benchmark": "shared_prefix",
        "device": facts.name,
        "versions": versions(),
        "rows": rows,
    }
    print(json.dumps(document))
    return int(any(max(row["error"].values()) > ERROR_LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
