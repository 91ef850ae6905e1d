"""The Triton kernel of ragged_attention; see kernels/ragged_attention.py for the definition.

A program has BLOCK_ROWS queries of one request and head.  Programs are found in slots: request r
has those from cu_q[r] // BLOCK_ROWS + r on, enough for its tiles, so that the grid is of padded
sizes.  Rows behind cu_q[-1] are one more request, without keys.  Worked example, BLOCK_ROWS 4, 13
tokens, cu_q [0, 6, 7, 12]:

    slot      0 1 2 3 4 5 6 7
    request   0 0 1 2 2 - 3 -   first slots 0, 6 // 4 + 1 = 2, 7 // 4 + 2 = 3, 12 // 4 + 3 = 6
    queries   0 4 0 0 4   0
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._check import has_aligned_rows, is_copyable
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import dot, scores_log2, softmax_finish, softmax_step
from paceline.kernels._triton.runtime import (
    TileConfig,
    block_dim,
    cdiv,
    interpreted,
    keys_per_stage,
)
from paceline.kernels.stand_in import is_hopper

_KEYS = 64
# Queries of a tile; where there are programs enough, of heads of up to _NARROW columns of 16 bits.
_ROWS, _MANY_ROWS, _NARROW = 64, 128, 64
_ENOUGH = 256  # programs: about two for each processor of a large GPU
_WIDE = 128  # columns of a head above which a tile has fewer keys
_BLOCK_REQS = 64  # first slots that are looked at together
_MANY = TileConfig(block_rows=_MANY_ROWS, block_keys=_KEYS, num_warps=8, num_stages=3)
# Of `ragged_groups`.
_LEAST_TOKENS = 1024  # below, few processors have work
_DIM = 128  # of a head; of 64 the other kernel is as fast
# Of keys with shared columns: tiles in 16 bits, and in 32.
_SHARING = TileConfig(block_rows=128, block_keys=64, num_warps=8, num_stages=3)
_SHARING_WIDE = TileConfig(block_rows=64, block_keys=32, num_warps=4, num_stages=2)


@triton.jit
def _attend_tile(
    start,  # the tile's first key, of its request
    begin_k,  # the request's first key
    num_k,
    position,  # [BLOCK_ROWS] of each query among the request's keys
    row_live,  # [BLOCK_ROWS] bool
    end,  # [BLOCK_ROWS] int32 keys before it are visible; read when ENDS
    q,  # [BLOCK_ROWS, BLOCK_DIM_K]
    shared_q,  # [BLOCK_ROWS, BLOCK_DIM_SHARED]; read when DIM_SHARED
    k_head_ptr,  # [keys, head_dim] of one KV head
    v_head_ptr,  # [keys, v_head_dim] likewise
    shared_k_ptr,  # [keys, shared_dim], or None
    stride_k_token,
    stride_v_token,
    stride_shared_k_token,
    scale,
    running_max,  # [BLOCK_ROWS] float32
    running_sum,  # [BLOCK_ROWS] float32
    acc,  # [BLOCK_ROWS, BLOCK_DIM_V] float32
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    ENDS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_SHARED: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_DIM_SHARED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of the tile
):
    """The online softmax behind one more tile of keys."""
    dims_k, dims_v = tl.arange(0, BLOCK_DIM_K), tl.arange(0, BLOCK_DIM_V)
    keys = start + tl.arange(0, BLOCK_KEYS)
    live = keys < num_k
    place = (begin_k + keys).to(tl.int64)[:, None]
    k_ptrs = k_head_ptr + place * stride_k_token + dims_k[None, :]
    v_ptrs = v_head_ptr + place * stride_v_token + dims_v[None, :]
    if MASKED:
        k = tl.load(k_ptrs, mask=live[:, None] & (dims_k < DIM_K)[None, :], other=0.0)
    elif DIM_K == BLOCK_DIM_K:
        k = tl.load(k_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(dims_k < DIM_K)[None, :], other=0.0)
    products = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32), WIDEN)
    if DIM_SHARED:
        dims_shared = tl.arange(0, BLOCK_DIM_SHARED)
        shared_ptrs = shared_k_ptr + place * stride_shared_k_token + dims_shared[None, :]
        is_shared = (dims_shared < DIM_SHARED)[None, :]
        if MASKED:
            shared_k = tl.load(shared_ptrs, mask=live[:, None] & is_shared, other=0.0)
        elif DIM_SHARED == BLOCK_DIM_SHARED:
            shared_k = tl.load(shared_ptrs)
        else:
            shared_k = tl.load(shared_ptrs, mask=is_shared, other=0.0)
        products = dot(shared_q, tl.trans(shared_k), products, WIDEN)
    scores = scores_log2(products, scale, SOFT_CAP)
    if MASKED:
        visible = live[None, :] & row_live[:, None]
        ahead = keys[None, :] - position[:, None]
        if BACK is not None:
            visible = visible & (ahead > -BACK)
        if AHEAD is not None:
            visible = visible & (ahead < AHEAD)
        if ENDS:
            visible = visible & (keys[None, :] < end[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        v = tl.load(v_ptrs, mask=live[:, None] & (dims_v < DIM_V)[None, :], other=0.0)
    elif DIM_V == BLOCK_DIM_V:
        v = tl.load(v_ptrs)
    else:
        v = tl.load(v_ptrs, mask=(dims_v < DIM_V)[None, :], other=0.0)
    return softmax_step(scores, v, running_max, running_sum, acc, WIDEN)


@triton.jit(do_not_specialize=["tokens", "reqs"])
def _ragged_attention_kernel(
    q_ptr,  # [tokens, heads, head_dim]
    k_ptr,  # [keys, kv_heads, head_dim]
    v_ptr,  # [keys, kv_heads, v_head_dim]
    shared_q_ptr,  # [tokens, heads, shared_dim], or None
    shared_k_ptr,  # [keys, shared_dim], or None
    cu_q_ptr,  # [reqs + 1] int32
    cu_k_ptr,  # [reqs + 1] int32
    prefix_ptr,  # [reqs] int32, or None
    visible_end_ptr,  # [tokens] int32, or None
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_shared_q_token,
    stride_shared_q_head,
    stride_shared_k_token,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    tokens,
    reqs,
    group,  # query heads of a KV head
    scale,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    ENDS: tl.constexpr,  # visible_end_ptr is there
    WHOLE_TILES: tl.constexpr,  # those that no mask divides go first, without one
    SOFT_CAP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_SHARED: tl.constexpr,  # 0: there are none
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_DIM_SHARED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    slot, head = tl.program_id(0), tl.program_id(1)
    request = -1
    for block in range(0, reqs + 1, BLOCK_REQS):
        requests = block + tl.arange(0, BLOCK_REQS)
        first_slots = tl.load(cu_q_ptr + requests, mask=requests <= reqs, other=0) // BLOCK_ROWS
        begun = (first_slots + requests <= slot) & (requests <= reqs)
        request += tl.sum(begun.to(tl.int32), 0)
    begin_q, begin_k = tl.load(cu_q_ptr + request), tl.load(cu_k_ptr + request)
    end_q = tl.load(cu_q_ptr + request + 1, mask=request < reqs, other=tokens)
    end_k = tl.load(cu_k_ptr + request + 1, mask=request < reqs, other=begin_k)
    let_next_start(OVERLAPPED)
    num_q, num_k = end_q - begin_q, end_k - begin_k
    first = (slot - begin_q // BLOCK_ROWS - request) * BLOCK_ROWS
    if first < num_q:
        rows = first + tl.arange(0, BLOCK_ROWS)
        row_live = rows < num_q
        position = rows + num_k - num_q
        token = (begin_q + rows).to(tl.int64)
        dims_k, dims_v = tl.arange(0, BLOCK_DIM_K), tl.arange(0, BLOCK_DIM_V)
        q = tl.load(
            q_ptr + token[:, None] * stride_q_token + head * stride_q_head + dims_k[None, :],
            mask=row_live[:, None] & (dims_k < DIM_K)[None, :],
            other=0.0,
        )
        shared_q = q
        if DIM_SHARED:
            dims_shared = tl.arange(0, BLOCK_DIM_SHARED)
            shared_q_head_ptr = shared_q_ptr + head * stride_shared_q_head
            shared_q = tl.load(
                shared_q_head_ptr + token[:, None] * stride_shared_q_token + dims_shared[None, :],
                mask=row_live[:, None] & (dims_shared < DIM_SHARED)[None, :],
                other=0.0,
            )
        k_head_ptr = k_ptr + (head // group) * stride_k_head
        v_head_ptr = v_ptr + (head // group) * stride_v_head
        lowest, stop = 0, num_k
        if BACK is not None:
            low = tl.maximum(first + num_k - num_q - BACK + 1, 0)
            lowest = low // BLOCK_KEYS * BLOCK_KEYS
        if AHEAD is not None:
            stop = tl.minimum(num_k, first + BLOCK_ROWS + num_k - num_q + AHEAD - 1)
        end = position
        if ENDS:
            prefix = tl.load(prefix_ptr + request, mask=request < reqs, other=0)
            end = tl.load(visible_end_ptr + token, mask=row_live, other=0) - prefix
            stop = tl.minimum(num_k, tl.max(end, 0))
        running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
        if WHOLE_TILES:
            # Tiles that no row's mask divides; the rest, behind them, are few.
            whole = num_k
            if AHEAD is not None:
                whole = tl.minimum(num_k, tl.maximum(first + num_k - num_q + AHEAD, 0))
            whole = whole // BLOCK_KEYS * BLOCK_KEYS
            for start in range(0, whole, BLOCK_KEYS):
                running_max, running_sum, acc = _attend_tile(
                    start, begin_k, num_k, position, row_live, end, q, shared_q, k_head_ptr,
                    v_head_ptr, shared_k_ptr, stride_k_token, stride_v_token, stride_shared_k_token,
                scale,
                    running_max, running_sum, acc, BACK, AHEAD, ENDS, SOFT_CAP, DIM_K, DIM_V,
                    DIM_SHARED, BLOCK_DIM_K, BLOCK_DIM_V, BLOCK_DIM_SHARED, BLOCK_ROWS, BLOCK_KEYS,
                    WIDEN, False,
                )  # fmt: skip
            lowest = whole
        for start in range(lowest, stop, BLOCK_KEYS):
            running_max, running_sum, acc = _attend_tile(
                start, begin_k, num_k, position, row_live, end, q, shared_q, k_head_ptr, v_head_ptr,
                shared_k_ptr, stride_k_token, stride_v_token, stride_shared_k_token, scale,
                running_max, running_sum, acc, BACK, AHEAD, ENDS, SOFT_CAP, DIM_K, DIM_V,
                DIM_SHARED, BLOCK_DIM_K, BLOCK_DIM_V, BLOCK_DIM_SHARED, BLOCK_ROWS, BLOCK_KEYS,
                WIDEN, True,
            )  # fmt: skip
        out, lse = softmax_finish(running_max, running_sum, acc)
        tl.store(
            out_ptr + token[:, None] * stride_out_token + head * stride_out_head + dims_v[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=row_live[:, None] & (dims_v < DIM_V)[None, :],
        )
        lse_places = lse_ptr + token * stride_lse_token + head
        tl.store(lse_places, lse * 0.6931471805599453, mask=row_live)


def launch_ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_q: Tensor | None,
    shared_k: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    prefix_lens: Tensor | None,
    visible_end: Tensor | None,
    scale: float,
    soft_cap: float | None,
    back: int | None,
    ahead: int | None,
    out: Tensor,
    lse: Tensor,
    *,
    tiles: TileConfig | None = None,
) -> None:
    """One program per head and slot of BLOCK_ROWS queries.  tiles: None: the usual."""
    (tokens, heads, dim), reqs, v_dim = q.shape, cu_q.shape[0] - 1, v.shape[2]
    if not tokens:
        return
    is_plain = back is None and visible_end is None and soft_cap is None and shared_k is None
    is_enough = tiles is None and tokens >= _LEAST_TOKENS
    if is_enough and is_plain and ahead in (None, 1) and fits_groups(q, k, v, out):
        from paceline.kernels._triton.ragged_groups import launch_ragged_groups

        launch_ragged_groups(q, k, v, cu_q, cu_k, scale, out, lse, causal=ahead == 1)
        return
    shared_dim, shared_strides = 0, (0, 0, 0)
    if shared_q is not None and shared_k is not None:
        shared_dim = shared_k.shape[1]
        shared_strides = (*shared_q.stride()[:2], shared_k.stride(0))
    programs = cdiv(tokens, _MANY_ROWS) * heads
    tiles = tiles or _usual_tiles(dim, v_dim, shared_dim, q.element_size(), programs)
    launch(
        _ragged_attention_kernel,
        (cdiv(tokens, tiles.block_rows) + reqs + 1, heads),
        q,
        k,
        v,
        shared_q,
        shared_k,
        cu_q,
        cu_k,
        prefix_lens,
        visible_end,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *shared_strides,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        tokens,
        reqs,
        heads // k.shape[1],
        scale,
        BACK=back,
        AHEAD=ahead,
        ENDS=visible_end is not None,
        WHOLE_TILES=back is None and visible_end is None,
        SOFT_CAP=soft_cap,
        DIM_K=dim,
        DIM_V=v_dim,
        DIM_SHARED=shared_dim,
        BLOCK_DIM_K=block_dim(dim),
        BLOCK_DIM_V=block_dim(v_dim),
        BLOCK_DIM_SHARED=block_dim(shared_dim),
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_KEYS=tiles.block_keys,
        BLOCK_REQS=_BLOCK_REQS,
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_ragged_attention_kernel),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlap_options(q.device, _ragged_attention_kernel),
    )


def fits_groups(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> bool:
    """Whether `ragged_groups` takes these, keys side by side or in pages; it has no window, no cap
    of scores, no blocks and no shared columns.  By shapes, strides and dtypes only; that k and v
    are of q's, or codes in pages, is for the caller to see to."""
    return (
        is_hopper(q.device)
        and out.dtype == q.dtype
        and is_copyable(q)
        and all(has_aligned_rows(x) and x.shape[-1] == x.stride(-2) == _DIM for x in (q, k, v))
        and k.shape[0] > 0
    )


def _usual_tiles(
    dim: int, v_dim: int, shared_dim: int, element_bytes: int, programs: int
) -> TileConfig:
    """programs: of tiles of _MANY_ROWS."""
    is_wide = max(dim, v_dim, shared_dim) > _WIDE
    if shared_dim and not is_wide:
        return _SHARING if element_bytes == 2 else _SHARING_WIDE
    if element_bytes == 2 and max(dim, v_dim) <= _NARROW and programs >= _ENOUGH:
        return _MANY
    is_wide = max(dim, v_dim) > _WIDE
    keys = keys_per_stage(dim + shared_dim, v_dim, element_bytes) if is_wide else _KEYS
    return TileConfig(block_rows=_ROWS, block_keys=keys, num_warps=4, num_stages=2)
