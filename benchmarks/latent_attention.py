"""How long does decoding over a latent cache (absorbed MLA) take, beside the peers and the machine?

    PYTHONPATH=src python benchmarks/latent_attention.py

Rank 512 and 64 columns that turn, bfloat16, one query per request, pages of 64 in random order;
K and V are one row.  Each contender meets the definition in float64 on NaN-poisoned pages and is
then timed in turns with the others, in CUDA graphs of layers whose rows exceed the L2 cache.
Lengths differ from request to request.  `triton-fp8` reads the same rows as scaled latents
(kernels/scaled_latents.py); `--tiles 16x64x4x3x4` adds ours over them with these query rows, keys,
warps, stages and splits.  A table for people, then one JSON document as the last line.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.bench.interleaved import time_interleaved
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    SplitWorkspace,
    Weighing,
    paged_extend,
    split_workspace,
)
from paceline.kernels.scaled_latents import ScaledLatents, quantise_latents
from paceline.plan.machine import local_device, versions
from paceline.proof.rig.paged import errors, permuted_pages

RANK, ROPE, PAGE = 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
COPY_BYTES_S = 4.23e12  # measured copy bandwidth of an H200
MATRIX_FLOPS = 790e12  # measured bfloat16 products of an H200
COLD_BYTES = 150e6  # of all layers together
ERROR_LIMIT = 2.0  # of the unit of `worst_error`
CASES = tuple(
    (heads, batch, keys) for heads in (16, 128) for keys in (1024, 8192) for batch in (1, 16, 64)
)
Run = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One decode step over several layers."""

    q: Tensor  # [batch, heads, RANK + ROPE]
    caches: list[Tensor]  # [layers] of [num_pages, PAGE, 1, RANK + ROPE]
    scaled: list[PagedCache]  # [layers] the same, in float8
    page_table: Tensor  # [batch, max_pages]  int32
    kv_lens: Tensor  # [batch]  int32
    workspace: SplitWorkspace

    @property
    def rows(self) -> PagedRows:
        batch = len(self.kv_lens)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=self.q.device)
        return PagedRows(self.page_table, self.kv_lens - 1, self.kv_lens, starts, 1)

    def cache(self, layer: int) -> PagedCache:
        """K, and V in it."""
        whole = self.caches[layer]
        return PagedCache(whole, whole[..., :RANK], None, None)


def scaled_cache(rows: Tensor) -> PagedCache:
    """rows: [num_pages, PAGE, 1, RANK + ROPE]."""
    codes, scales = quantise_latents(rows[..., :RANK])
    return PagedCache(codes, codes, beside=ScaledLatents(rows[..., RANK:].contiguous(), scales))


def make_work(heads: int, batch: int, keys: int, device: torch.device) -> Work:
    """Requests of `keys` keys and a few less each; what is behind them is NaN."""
    lens = [keys - 13 * request % 97 for request in range(batch)]
    generator = torch.Generator().manual_seed(0)
    table, num_pages = permuted_pages(lens, PAGE, generator, spare=0)
    row_bytes = 2 * (RANK + ROPE) * PAGE * num_pages
    layers = max(2, min(40, int(COLD_BYTES / row_bytes)))
    torch.manual_seed(0)
    shape = (num_pages, PAGE, 1, RANK + ROPE)
    caches = [torch.randn(shape, device=device).bfloat16() for _ in range(layers)]
    for request, length in enumerate(lens):
        if length % PAGE:
            for cache in caches:
                cache[table[request, length // PAGE].item(), length % PAGE :] = float("nan")
    return Work(
        q=torch.randn(batch, heads, RANK + ROPE, device=device).bfloat16(),
        caches=caches,
        scaled=[scaled_cache(rows) for rows in caches],
        page_table=F.pad(table, (0, 1)).to(device),
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        workspace=split_workspace(batch, [(heads, 1)], v_head_dim=RANK, device=device),
    )


def ours(work: Work) -> Run:
    """paged_extend, as the triton backend calls it."""
    tokens, heads, _ = work.q.shape
    out = work.q.new_empty(tokens, heads, RANK)
    lse = work.q.new_empty(tokens, heads, dtype=torch.float32)
    rows = work.rows

    def run(layer: int) -> Tensor:
        call = PagedCall(work.q, work.cache(layer), rows, Weighing(SCALE), out, lse)
        paged_extend(call, work.workspace)
        return out

    return run


def ours_scaled(work: Work, tiles: str | None = None) -> Run:
    """The same over scaled latents; with `tiles` as `--tiles` has them."""
    tokens, heads, _ = work.q.shape
    out = work.q.new_empty(tokens, heads, RANK)
    lse = work.q.new_empty(tokens, heads, dtype=torch.float32)
    rows, weighing = work.rows, Weighing(SCALE)
    if tiles is None:

        def run(layer: int) -> Tensor:
            paged_extend(
                PagedCall(work.q, work.scaled[layer], rows, weighing, out, lse), work.workspace
            )
            return out

        return run
    from paceline.kernels._triton.paged_extend import launch_paged_extend
    from paceline.kernels._triton.runtime import SplitConfig

    block_rows, keys, warps, stages, splits = map(int, tiles.split("x"))
    config = SplitConfig(
        block_rows=block_rows, block_keys=keys, num_warps=warps, num_stages=stages, min_tiles=1
    )
    partials = tokens * splits
    workspace = SplitWorkspace(
        partial_out=out.new_empty(partials, heads, RANK, dtype=torch.float32),
        partial_lse=lse.new_empty(partials, heads),
        finished=work.workspace.finished,
    )

    def run_tiles(layer: int) -> Tensor:
        call = PagedCall(work.q, work.scaled[layer], rows, weighing, out, lse)
        launch_paged_extend(call, workspace, splits=splits, config=config)
        return out

    return run_tiles


def flashinfer(work: Work) -> Run:
    """BatchMLAPagedAttentionWrapper, planned once."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    device, batch = work.q.device, len(work.kv_lens)
    heads = work.q.shape[1]
    counts = -(-work.kv_lens // PAGE)
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    pages = [row[:count] for row, count in zip(work.page_table, counts.tolist(), strict=True)]
    space = torch.empty(128 << 20, dtype=torch.int8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(space)
    wrapper.plan(
        work.rows.cu_seqlens_q, starts, torch.cat(pages), work.kv_lens, heads, RANK, ROPE, PAGE,
        True, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    nope, turned = work.q.split((RANK, ROPE), 2)
    nope, turned = nope.contiguous(), turned.contiguous()

    def run(layer: int) -> Tensor:
        latent, rope = work.caches[layer][:, :, 0].split((RANK, ROPE), 2)
        return wrapper.run(nope, turned, latent, rope)

    return run


CONTENDERS: dict[str, Callable[[Work], Run]] = {
    "triton": ours,
    "triton-fp8": ours_scaled,
    "flashinfer": flashinfer,
}
OF_TILES = "triton-fp8:"


def make_run(name: str, work: Work) -> Run:
    """A contender of that name, or ours over scaled latents with the tiles that it names."""
    if name.startswith(OF_TILES):
        return ours_scaled(work, name.removeprefix(OF_TILES))
    return CONTENDERS[name](work)


def worst_error(work: Work, cache: PagedCache, out: Tensor) -> float:
    """The largest error of some requests, in the unit of `proof.rig.paged.errors`."""
    some = work.rows._replace(
        page_table=work.page_table[:4],
        prefix_lens=work.rows.prefix_lens[:4],
        kv_lens=work.kv_lens[:4],
        cu_seqlens_q=work.rows.cu_seqlens_q[:5],
    )
    return float(errors(out[:4], work.q[:4], cache, some, Weighing(SCALE)).max())


def measure(case: tuple[int, int, int], names: list[str], device: torch.device) -> dict[str, Any]:
    """One row: microseconds and errors of each contender, and shares of the machine."""
    heads, batch, keys = case
    work = make_work(heads, batch, keys, device)
    runs: dict[str, Run] = {}
    errors, refused = {}, {}
    for name in names:
        try:
            run = make_run(name, work)
            cache = work.scaled[0] if name.startswith("triton-fp8") else work.cache(0)
            errors[name] = worst_error(work, cache, run(0))
        except (ImportError, RuntimeError, ValueError) as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            continue
        if errors[name] <= ERROR_LIMIT:
            runs[name] = run
    timed = time_interleaved(runs, layers=len(work.caches), device=device)
    total = int(work.kv_lens.sum())
    # Of a row: two bytes a column, or codes, a scale and what turned.
    bytes_of = {
        name: RANK + 4 + 2 * ROPE if name.startswith("triton-fp8") else 2 * (RANK + ROPE)
        for name in names
    }
    least_s = {name: each * total / COPY_BYTES_S for name, each in bytes_of.items()}
    flops = 2 * heads * total * (2 * RANK + ROPE)
    seconds = {name: timing.median_s for name, timing in timed.items()}
    row = {
        "heads": heads,
        "requests": batch,
        "keys": keys,
        "us": {name: 1e6 * s for name, s in seconds.items()},
        "spread": {name: timing.spread for name, timing in timed.items()},
        "of_memory_limit": {name: least_s[name] / s for name, s in seconds.items()},
        "of_matrix_limit": {name: flops / s / MATRIX_FLOPS for name, s in seconds.items()},
        "error": errors,
        "refused": refused,
    }
    shown = [
        f"{name} {us:.1f} us ({row['of_memory_limit'][name]:.2f} mem, "
        f"{row['of_matrix_limit'][name]:.2f} mat)"
        for name, us in row["us"].items()
    ]
    print(f"{heads:3d} heads {batch:2d} x {keys:5d}: {', '.join(shown)} {errors} {refused}")
    return row


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", default="triton,triton-fp8,flashinfer", help="in turns")
    parser.add_argument("--tiles", default="", help="ROWSxKEYSxWARPSxSTAGESxSPLITS,...")
    parser.add_argument("--cases", default="", help="HEADSxREQUESTSxKEYS,...; else all")
    asked = parser.parse_args()
    names = asked.contenders.split(",")
    names += [OF_TILES + tiles for tiles in asked.tiles.split(",") if tiles]
    cases = CASES
    if asked.cases:
        cases = tuple(tuple(map(int, each.split("x"))) for each in asked.cases.split(","))
    facts = local_device()
    rows = [measure(case, names, torch.device(facts.device_type)) for case in cases]
    wrong = [row for row in rows if max(row["error"].values(), default=0.0) > ERROR_LIMIT]
    document = {
        "benchmark": "latent_attention",
        "device": facts.name,
        "versions": versions(),
        "rank": RANK,
        "rope": ROPE,
        "page_size": PAGE,
        "rows": rows,
    }
    print(json.dumps(document))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
