"""The workloads that benchmarks/kernels.py times: Llama-3.1-8B shapes in bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels_gate import rope_table
from paceline.kernels.act_and_mul import act_and_mul
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    Weighing,
    decode_splits,
    paged_decode,
    paged_extend,
    split_workspace,
)
from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.rope import Rope
from paceline.kernels.rope_write_kv import KVSlots, rope_write_kv

HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
HIDDEN, INTER = 4096, 14336
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
SPAN_BYTES = 256 << 20  # launches of one graph touch at least this much, several times the L2
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # K and V of one token


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One thing to time; `launches` allocates, so that only one workload is live at a time."""

    op: str
    label: str
    launches: Callable[[], list[Callable[[], None]]]
    bytes: float
    flops: float | None = None  # set where the matrix units are the limit


def attention_works() -> list[Work]:
    """Decode at three batch sizes and two lengths; extend without prefix."""
    works = [
        Work(
            op="paged_decode",
            label=f"{batch} x {keys} keys, {HEADS}/{KV_HEADS}x{DIM}, page {PAGE_SIZE}",
            launches=partial(_decode_launches, batch, keys),
            bytes=float(batch * keys * TOKEN_BYTES),
        )
        for batch in (1, 8, 64)
        for keys in (1024, 4096)
    ]
    works += [
        Work(
            op="paged_extend",
            label=f"{batch} x {extend} tokens, {HEADS}/{KV_HEADS}x{DIM}, page {PAGE_SIZE}",
            launches=partial(_extend_launches, batch, extend),
            bytes=float(batch * extend * TOKEN_BYTES),
            flops=extend_flops(batch, extend),
        )
        for batch, extend in ((1, 1024), (8, 1024))
    ]
    return works


def small_works() -> list[Work]:
    """The other kernels at decode and prefill sizes; below ~25 MB they run out of L2."""
    works = []
    for tokens in (64, 8192):
        row = float(tokens * HIDDEN * 2)
        qkv_row = float(tokens * (HEADS + 2 * KV_HEADS) * DIM * 2)
        gated = float(tokens * INTER * 2)
        cases = [
            ("rms_norm", f"{tokens} x {HIDDEN}", _norm_launches, 2 * row),
            ("add_rms_norm", f"{tokens} x {HIDDEN}", _add_norm_launches, 4 * row),
            (
                "rope_write_kv",
                f"{tokens} x {HEADS}+2*{KV_HEADS} x {DIM}",
                _rope_write_launches,
                2 * qkv_row + tokens * TOKEN_BYTES / 2,
            ),
            ("act_and_mul", f"{tokens} x 2*{INTER} silu", _act_launches, 3 * gated),
        ]
        works += [
            Work(op=op, label=label, launches=partial(launches, tokens), bytes=float(moved))
            for op, label, launches, moved in cases
        ]
    return works


def tuning_works() -> list[Work]:
    """Other tiles, stages and splits for decode, and other tiles for extend."""
    from paceline.kernels._triton.runtime import SplitConfig

    works = []
    for batch, keys in ((1, 4096), (8, 4096), (64, 1024), (64, 4096)):
        usual = decode_splits(batch, KV_HEADS, device=DEVICE)
        for block_keys, warps, stages in (
            (32, 2, 5), (32, 4, 3), (32, 4, 5), (32, 4, 7), (64, 4, 2), (64, 4, 3), (64, 4, 5),
            (64, 4, 7), (64, 8, 5), (128, 4, 3), (128, 8, 5),
        ):  # fmt: skip
            for splits in sorted({max(1, usual // 2), usual, min(64, usual + (usual + 1) // 2)}):
                config = SplitConfig(
                    block_rows=16,
                    block_keys=block_keys,
                    num_warps=warps,
                    num_stages=stages,
                    min_tiles=1,
                )
                works.append(
                    Work(
                        op="paged_decode",
                        label=f"tune {batch} x {keys}: keys {block_keys} warps {warps} "
                        f"stages {stages} splits {splits}",
                        launches=partial(_decode_launches, batch, keys, config, splits),
                        bytes=float(batch * keys * TOKEN_BYTES),
                    )
                )
    for rows, block_keys, warps, stages in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 32, 8, 3), (128, 128, 8, 3),
        (64, 64, 4, 3), (64, 64, 4, 5), (64, 32, 4, 5),
    ):  # fmt: skip
        config = SplitConfig(
            block_rows=rows,
            block_keys=block_keys,
            num_warps=warps,
            num_stages=stages,
            min_tiles=1,
        )
        works.append(
            Work(
                op="paged_extend",
                label=f"tune 8 x 1024: rows {rows} keys {block_keys} warps {warps} stages {stages}",
                launches=partial(_extend_launches, 8, 1024, config),
                bytes=float(8 * 1024 * TOKEN_BYTES),
                flops=extend_flops(8, 1024),
            )
        )
    return works


def extend_flops(batch: int, extend: int) -> float:
    """Two matrix products over the causal triangle."""
    return 4.0 * HEADS * DIM * batch * extend * (extend + 1) / 2


def _pages(batch: int, keys: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """K pool, V pool and enough permuted page tables that their pages span SPAN_BYTES."""
    per_request = -(-keys // PAGE_SIZE)
    copies = max(1, min(64, -(-SPAN_BYTES // (batch * keys * TOKEN_BYTES))))
    num_pages = copies * batch * per_request
    shape = (num_pages, PAGE_SIZE, KV_HEADS, DIM)
    pools = [torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    order = torch.randperm(num_pages, device=DEVICE).to(torch.int32)
    return pools[0], pools[1], list(order.view(copies, batch, per_request).unbind(0))


def _decode_launches(
    batch: int, keys: int, config: object | None = None, splits: int | None = None
) -> list[Callable[[], None]]:
    from paceline.kernels._triton.paged_decode import launch_paged_decode

    workspace = split_workspace(batch, [(HEADS, KV_HEADS)], v_head_dim=DIM, device=DEVICE)
    if splits is None:
        launch = paged_decode
    else:
        workspace = replace(
            workspace,
            partial_out=torch.empty(batch * splits, HEADS, DIM, device=DEVICE),
            partial_lse=torch.empty(batch * splits, HEADS, device=DEVICE),
        )
        launch = partial(launch_paged_decode, splits=splits, turn=None, config=config)
    return [partial(launch, call, workspace) for call in _calls(batch, keys, extend=1)]


def _extend_launches(
    batch: int, extend: int, config: object | None = None
) -> list[Callable[[], None]]:
    from paceline.kernels._triton.paged_extend import launch_paged_extend

    launch = paged_extend
    if config is not None:
        launch = partial(launch_paged_extend, splits=1, config=config)
    return [partial(launch, call, None) for call in _calls(batch, extend, extend=extend)]


def _calls(batch: int, keys: int, *, extend: int) -> list[PagedCall]:
    """The same rows over each page table of the pool."""
    k_cache, v_cache, tables = _pages(batch, keys)
    q = torch.randn(batch * extend, HEADS, DIM, dtype=DTYPE, device=DEVICE)
    lens = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * extend
    out, lse = torch.empty_like(q), torch.empty(batch * extend, HEADS, device=DEVICE)
    return [
        PagedCall(
            q,
            PagedCache(k_cache, v_cache),
            PagedRows(table, lens - extend, lens, starts, extend),
            Weighing(DIM**-0.5),
            out,
            lse,
        )
        for table in tables
    ]


def _norm_launches(tokens: int) -> list[Callable[[], None]]:
    x = torch.randn(tokens, HIDDEN, dtype=DTYPE, device=DEVICE)
    weight, out = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE), torch.empty_like(x)
    return [partial(rms_norm, x, weight, 1e-5, out=out)] * 16


def _add_norm_launches(tokens: int) -> list[Callable[[], None]]:
    x = torch.randn(tokens, HIDDEN, dtype=DTYPE, device=DEVICE)
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=DEVICE)
    return [partial(add_rms_norm, x, torch.zeros_like(x), weight, 1e-5)] * 16


def _rope_write_launches(tokens: int) -> list[Callable[[], None]]:
    fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device=DEVICE)
    q, k, v = fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    rope = Rope(rope_table(4096, DIM, "cuda"), torch.randint(0, 4096, (tokens,), device=DEVICE))
    k_cache, v_cache, _ = _pages(1, 65536)
    into = KVSlots(k_cache, v_cache, torch.randperm(65536, device=DEVICE)[:tokens], None, None)
    return [partial(rope_write_kv, q, k, v, into=into, rope=rope, norms=None)] * 16


def _act_launches(tokens: int) -> list[Callable[[], None]]:
    x = torch.randn(tokens, 2 * INTER, dtype=DTYPE, device=DEVICE)
    return [partial(act_and_mul, x, "silu")] * 16
