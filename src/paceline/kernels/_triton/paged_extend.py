"""Launches of paged_extend: which tiles, in how many launches.  The kernel is in
paged_extend_kernel.py; prompts are ragged_groups.py's where that takes them.
"""

from functools import partial
from typing import Any

import torch

from paceline.core.modes import MaskKind
from paceline.kernels._triton.launch import launch, overlap_options
from paceline.kernels._triton.paged_extend_kernel import paged_extend_kernel
from paceline.kernels._triton.ragged_attention import fits_groups
from paceline.kernels._triton.runtime import (
    SplitConfig,
    block_dim,
    cdiv,
    interpreted,
    keys_per_stage,
    next_power_of_2,
    require_runnable,
    shared_memory_bytes,
)
from paceline.kernels._triton.split_merge import launch_merge, splits_per_load
from paceline.kernels._triton.visible_keys import block_nodes
from paceline.kernels.paged_attention.call import PagedCall, Weighing
from paceline.kernels.paged_attention.splits import (
    FEW_ROWS,
    SHORT_ROWS,
    WIDE_ROWS,
    SplitWorkspace,
    in_pairs,
    row_tile,
    tile_slots,
)

_ALL_ROWS = 1 << 30
_MANY_LATENT = (
    16  # programs of few wide rows: each has many keys, and its warps wait for one another
)
_PART_COLUMNS = 64  # of 16 bits: eight threads load them, so that a warp loads of four keys at once
_GROUP_PAGES = (16, 32, 64, 128)  # tokens, of which `ragged_groups` makes tiles
# Queries times heads from which it is faster, and with a launch of many decodes beside it.
_GROUP_ROWS, _MIXED_GROUP_ROWS = 24576, 6144
_ROOMY = 163840  # bytes of shared memory for tiles on their way while others are read
_MANY_PROGRAMS = 128  # fewer, unless they are split, would wait for keys alone


def extend_config(
    max_rows: int,
    head_dim: int,
    v_head_dim: int,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    shared_bytes: int,
    row_tile: int,
    is_split: bool,
) -> SplitConfig:
    """Static tile table of paged_extend; `max_rows` is max_extend_len * group.

    Few rows wait for memory.  Where programs share the keys, each has few of them: large tiles and
    four warps, which also merge.  Else there are programs enough, and small tiles as in a decode.
    """
    if is_split or max_rows <= FEW_ROWS:
        stage_keys = keys_per_stage(head_dim, v_head_dim, kv_dtype.itemsize)
        return SplitConfig(
            block_rows=row_tile,
            block_keys=stage_keys if is_split else max(16, stage_keys // 2),
            num_warps=4 if is_split else 2,
            num_stages=3,
            min_tiles=3,
        )
    widest = max(block_dim(head_dim), block_dim(v_head_dim))
    if dtype == torch.float32:
        largest = 16
    else:
        largest = 128 if widest <= 128 else 64
    block_rows = max(16, min(largest, next_power_of_2(max_rows)))
    return SplitConfig(
        block_rows=block_rows,
        block_keys=min(64, keys_per_stage(head_dim, v_head_dim, dtype.itemsize)),
        num_warps=8 if block_rows * widest >= 16384 else 4,
        num_stages=3 if shared_bytes >= _ROOMY else 2,
        min_tiles=1,
    )


def latent_config(
    block_rows: int, programs: int, *, is_scaled: bool, shared_bytes: int
) -> SplitConfig:
    """The same where V lies in K: a tile of keys is read once and is wide.

    is_scaled: in float8, whose tiles of 64 keys are as many bytes as of 32 in 16 bits.  Each warp
    then loads the queries for twice the keys.
    """
    pairs = in_pairs(block_rows, programs, is_scaled=is_scaled)
    few_keys = pairs and not is_scaled
    has_room = shared_bytes >= _ROOMY
    few_warps = pairs or (block_rows < WIDE_ROWS and programs >= _MANY_LATENT)
    return SplitConfig(
        block_rows=block_rows,
        block_keys=32 if few_keys else 64,
        num_warps=4 if few_warps else 8,
        num_stages=2 if block_rows == WIDE_ROWS or (is_scaled and not has_room) else 3,
        min_tiles=1,
    )


def launch_paged_extend(
    call: PagedCall,
    workspace: SplitWorkspace | None,
    *,
    splits: int,
    short_splits: int = 1,
    config: SplitConfig | None = None,
) -> None:
    """One program per tile of rows, KV head and request; `config` overrides the tile table.

    workspace: where splits of several meet.  short_splits: of requests with few rows among longer
    ones; 1 where these share no keys, and are a launch of their own only if requests are many.
    """
    q, cache, reqs, weighing, _, _ = call
    require_runnable(
        "q of paged_extend", q, paged_extend_kernel, otherwise="choose the torch attention backend"
    )
    tokens, heads, head_dim = q.shape
    _, page_size, kv_heads, v_head_dim = cache.v.shape
    group, num_reqs = heads // kv_heads, reqs.page_table.shape[0]
    max_rows = reqs.max_extend_len * group
    v_in_k = cache.v_in_k
    dim_k = v_head_dim if v_in_k else head_dim

    def tiles_of(rows: int, *, is_split: bool) -> SplitConfig:
        few = row_tile(num_reqs, kv_heads, rows, dtype=q.dtype, is_wide=v_in_k)
        if v_in_k:
            programs = num_reqs * kv_heads * cdiv(rows, few)
            return latent_config(
                few,
                programs,
                is_scaled=cache.beside is not None,
                shared_bytes=shared_memory_bytes(q.device),
            )
        return extend_config(
            rows,
            head_dim,
            v_head_dim,
            dtype=q.dtype,
            kv_dtype=cache.k.dtype,
            shared_bytes=shared_memory_bytes(q.device),
            row_tile=few,
            is_split=is_split,
        )

    is_usual = config is None
    config = config or tiles_of(max_rows, is_split=splits > 1)
    constants = {
        "MASK": reqs.mask.value,
        "WINDOW": weighing.window,
        "CHUNK": weighing.chunk,
        "NODES": block_nodes(reqs.max_extend_len) if reqs.mask is MaskKind.TREE else None,
        "SOFT_CAP": weighing.soft_cap,
        "PREFIX_ONLY": weighing.prefix_only,
        "GROUP": group,
        "PAGE_SIZE": page_size,
        "DIM_K": dim_k,
        "DIM_V": v_head_dim,
        "BLOCK_DIM_K": block_dim(dim_k),
        "BLOCK_DIM_V": block_dim(v_head_dim),
        "DIM_REST": head_dim - dim_k,
        "BLOCK_REST": block_dim(head_dim - dim_k),
        "V_IN_K": v_in_k,
        "SAME_STRIDES": cache.k.stride()[:2] == cache.v.stride()[:2],
        "WIDEN": q.dtype == torch.bfloat16 and interpreted(paged_extend_kernel),
    }
    start = partial(_start, call, workspace, constants)
    tiles = cdiv(max_rows, config.block_rows)
    slots = tile_slots(tokens * group, num_reqs, config.block_rows)
    in_slots = slots < tiles * num_reqs and (splits == 1 or not v_in_k)
    grid = (slots, kv_heads, splits) if in_slots else (tiles, kv_heads * num_reqs, splits)
    is_alike = tokens == num_reqs * reqs.max_extend_len or max_rows <= SHORT_ROWS
    is_few = kv_heads * num_reqs < _MANY_PROGRAMS
    is_alone = splits > 1 or is_alike or (is_few and short_splits == 1)
    above = 0 if is_alone else SHORT_ROWS
    is_enough = tokens * heads >= (_GROUP_ROWS if is_alone or is_few else _MIXED_GROUP_ROWS)
    if is_usual and splits == 1 and is_enough and takes_groups(call):
        from paceline.kernels._triton.ragged_groups import launch_paged_groups

        launch_paged_groups(call, above=above // group, leads=not is_alone)
    else:
        start(config, grid, splits, above=above, in_slots=in_slots, leads=not is_alone)
    if splits > 1 and v_in_k:
        assert workspace is not None, "splits meet in one"
        launch_merge(call, workspace, splits=splits)
    if is_alone:
        return
    assert splits == 1, "two launches have one workspace"
    few = tiles_of(SHORT_ROWS, is_split=True)
    grid = (SHORT_ROWS // few.block_rows, kv_heads * num_reqs, short_splits)
    start(few, grid, short_splits, most=SHORT_ROWS, follows=True)


def takes_groups(call: PagedCall) -> bool:
    """Whether `launch_paged_groups` takes a call; shapes, strides and dtypes only."""
    q, cache, rows, weighing, out, _ = call
    kv_dtype = q.dtype if cache.k_scale is None else torch.float8_e4m3fn
    return (
        rows.mask is MaskKind.CAUSAL
        and weighing == Weighing(weighing.scale)
        and cache.k.dtype == cache.v.dtype == kv_dtype
        and (cache.k_scale is None or cache.k.stride() == cache.v.stride())
        and cache.k.shape[1] in _GROUP_PAGES
        and fits_groups(q, cache.k, cache.v, out)
    )


def _start(
    call: PagedCall,
    workspace: SplitWorkspace | None,
    constants: dict[str, Any],
    config: SplitConfig,
    grid: tuple[int, int, int],
    splits: int,
    *,
    above: int = 0,
    most: int = _ALL_ROWS,
    in_slots: bool = False,
    leads: bool = False,
    follows: bool = False,
) -> None:
    is_wide = config.block_rows == WIDE_ROWS
    merged = splits_per_load(
        config.block_rows, constants["BLOCK_DIM_V"], num_warps=config.num_warps
    )
    loads_first = constants["V_IN_K"] and is_wide
    # What feeds matrix units from shared memory is laid down there as float16, once.
    words = call.cache.beside is not None and not is_wide
    weighing = call.weighing
    from_first = weighing.window is None and weighing.chunk is None  # tiles begin at multiples
    in_page = words and from_first and constants["PAGE_SIZE"] % config.block_keys == 0
    columns = constants["BLOCK_DIM_K"] // (2 if words else 1)
    in_parts = constants["V_IN_K"] and not is_wide
    launch(
        paged_extend_kernel,
        grid,
        *_arguments(call, workspace if splits > 1 else None, splits, words=words),
        above,
        most,
        IN_SLOTS=in_slots,
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        IN_PAGE=in_page,
        PARTS=max(1, columns // _PART_COLUMNS) if in_parts else 1,
        ONE_LOOP=weighing.window is not None or splits > 1,
        IS_SPLIT=splits > 1,
        MIN_TILES=config.min_tiles,
        MERGE_SPLITS=merged,
        LOADS_FIRST=loads_first,
        LOOP_STAGES=config.num_stages if loads_first else None,
        WORDS=words,
        LEADS=leads,
        FOLLOWS=follows,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
        **overlap_options(call.q.device, paged_extend_kernel),
    )


def _arguments(
    call: PagedCall, workspace: SplitWorkspace | None, splits: int, *, words: bool
) -> tuple[object, ...]:
    """Those of the kernel that a call gives.  words: codes of latents by twos."""
    q, cache, reqs, weighing, out, lse = call
    k = cache.k.view(torch.int16) if words else cache.k
    beside, tree_mask = cache.beside, reqs.tree_mask
    return (
        q,
        k,
        cache.v,
        reqs.page_table,
        reqs.prefix_lens,
        reqs.kv_lens,
        reqs.cu_seqlens_q,
        tree_mask,
        reqs.visible_end,
        cache.k_scale,
        cache.v_scale,
        *(beside or (None, None)),
        weighing.sinks,
        out,
        lse,
        None if workspace is None else workspace.partial_out,
        None if workspace is None else workspace.partial_lse,
        None if workspace is None else workspace.finished,
        *q.stride()[:2],
        *k.stride()[:3],
        *cache.v.stride()[:3],
        *((0,) * 4 if beside is None else (s for part in beside for s in part.stride()[:2])),
        reqs.page_table.stride(0),
        reqs.page_table.shape[1],
        0 if tree_mask is None else tree_mask.stride(0),
        *out.stride()[:2],
        q.shape[1],
        weighing.scale,
        splits,
        reqs.page_table.shape[0],
    )
