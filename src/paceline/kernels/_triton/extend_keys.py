"""What the Triton kernel of paged_extend does with one tile of keys.

Where V lies in K, a tile of keys is loaded once: its first DIM_K columns are scored and weighed,
the DIM_REST behind them scored alone, a tile of their own: 576 columns would be one of 1,024.
Of few rows the first come in PARTS of 128 bytes: a thread then loads of few keys, whose addresses
it adds up, and much of each.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.latent_keys import latent_scores, latent_step, load_parts
from paceline.kernels._triton.primitives import dot, load_rows, scores_log2, softmax_step
from paceline.kernels._triton.scaled_latents import scaled_scores, scaled_step
from paceline.kernels._triton.visible_keys import visible_keys


@triton.jit
def attend_keys(
    start,  # first key of the tile
    page,  # [keys] int32 page ids of the tile, or one where IN_PAGE
    end,  # keys from here on are dead
    query_position,  # [rows] int32
    token,  # [rows] int64
    row_live,  # [rows] bool
    tree_bits,  # [rows] int64
    visible_end,  # [rows] int32, of blocks
    q,  # [rows, BLOCK_DIM_K]; where V lies in K, PARTS of its columns
    q_last,  # of WORDS like q, which is of the first two of four columns then; else None
    q_rest,  # [rows, BLOCK_REST] or None
    k_head_ptr,  # [pages, page_size, head_dim] one KV head
    v_head_ptr,  # [pages, page_size, v_head_dim] one KV head
    turned_ptr,  # [pages, page_size, DIM_REST] or None
    row_scale_ptr,  # [pages, page_size] float32 or None
    tree_mask_ptr,  # [tokens, max_extend_len] bool or None
    stride_k_page,
    stride_k_slot,
    stride_v_page,
    stride_v_slot,
    stride_turned_page,
    stride_turned_slot,
    stride_row_scale_page,
    stride_row_scale_slot,
    stride_tree_token,
    token_begin,
    prefix_len,
    extend_len,
    running_max,  # [rows] float32
    running_sum,  # [rows] float32; of latents [rows, keys]
    acc,  # [rows, BLOCK_DIM_V] float32; where V lies in K, PARTS of its columns
    acc_odd,  # of WORDS like acc, which is of even columns then; else any
    scale,  # a number, or of narrowed queries [rows, 1]
    scale_rest,  # of q_rest
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    NODES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IN_PAGE: tl.constexpr,  # a tile lies in one page
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    DIM_REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    V_IN_K: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,  # codes are read by twos, and queries and sums are in two halves
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WIDEN: tl.constexpr,
    LOADS_FIRST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys; without MASKED every row sees every key of it."""
    keys = start + tl.arange(0, BLOCK_KEYS)
    live = keys < end
    if IN_PAGE:
        # What is the same for all keys is added to pointers once; what is left hardly changes.
        slot = tl.arange(0, BLOCK_KEYS)
        if MASKED:  # dead keys are the last one again, and weighed by 0
            slot = tl.minimum(slot, end - 1 - start)
        first_slot, page = start % PAGE_SIZE, page.to(tl.int64)
        k_head_ptr += page * stride_k_page + first_slot * stride_k_slot
        v_head_ptr += page * stride_v_page + first_slot * stride_v_slot
        if row_scale_ptr is not None:
            turned_ptr += page * stride_turned_page + first_slot * stride_turned_slot
            row_scale_ptr += page * stride_row_scale_page + first_slot * stride_row_scale_slot
        k_offsets = slot * stride_k_slot
        v_offsets = slot * stride_v_slot
    else:
        slot = keys % PAGE_SIZE
        k_offsets = page.to(tl.int64) * stride_k_page + slot * stride_k_slot
        if SAME_STRIDES:
            v_offsets = k_offsets
        else:
            v_offsets = page.to(tl.int64) * stride_v_page + slot * stride_v_slot
    GUARDED: tl.constexpr = MASKED and not IN_PAGE
    if WORDS:
        k = load_parts(k_head_ptr, k_offsets, live, DIM_K // 2, BLOCK_DIM_K // 2, PARTS, GUARDED)
    elif PARTS > 1:
        k = load_parts(k_head_ptr, k_offsets, live, DIM_K, BLOCK_DIM_K, PARTS, GUARDED)
    elif V_IN_K:
        k = (load_rows(k_head_ptr, k_offsets, live, DIM_K, BLOCK_DIM_K, GUARDED).to(q[0].dtype),)
    else:
        k = load_rows(k_head_ptr, k_offsets, live, DIM_K, BLOCK_DIM_K, GUARDED).to(q.dtype)
    if row_scale_ptr is not None:
        if IN_PAGE:
            rest_offsets = slot * stride_turned_slot
            scale_offsets = slot * stride_row_scale_slot
        else:
            rest_offsets = page.to(tl.int64) * stride_turned_page + slot * stride_turned_slot
            scale_offsets = page.to(tl.int64) * stride_row_scale_page + slot * stride_row_scale_slot
        rest = load_rows(turned_ptr, rest_offsets, live, DIM_REST, BLOCK_REST, GUARDED)
        if GUARDED:
            row_scale = tl.load(row_scale_ptr + scale_offsets, mask=live, other=1.0)
        else:
            row_scale = tl.load(row_scale_ptr + scale_offsets)
    elif V_IN_K:
        rest = load_rows(k_head_ptr + DIM_K, k_offsets, live, DIM_REST, BLOCK_REST, GUARDED)
    # It always holds: Triton puts what stands under a condition behind the next tile's loads.
    if not LOADS_FIRST or start < end:
        if row_scale_ptr is not None:
            scores = scaled_scores(
                q, q_last, q_rest, k, rest, row_scale, scale, scale_rest,
                extend_len > 0, SOFT_CAP, PARTS, LOADS_FIRST, WIDEN,
            )  # fmt: skip
        elif V_IN_K:
            products = latent_scores(
                q, q_rest, k, rest, scale, extend_len > 0, PARTS, LOADS_FIRST, WIDEN
            )
            scores = scores_log2(products, 1.0, SOFT_CAP)
        else:
            products = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32), WIDEN)
            scores = scores_log2(products, scale, SOFT_CAP)
        if MASKED:
            visible = visible_keys(
                keys, live, query_position, token, row_live, tree_bits, visible_end, tree_mask_ptr,
                stride_tree_token, token_begin, prefix_len, extend_len, MASK, WINDOW, CHUNK,
                NODES,
            )  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        if row_scale_ptr is not None:
            running_max, running_sum, acc, acc_odd = scaled_step(
                scores, k, row_scale, running_max, running_sum, acc, acc_odd, PARTS, WIDEN
            )
        elif V_IN_K:
            running_max, running_sum, acc = latent_step(
                scores, k, running_max, running_sum, acc, PARTS, WIDEN
            )
        else:
            v = load_rows(v_head_ptr, v_offsets, live, DIM_V, BLOCK_DIM_V, MASKED).to(q.dtype)
            running_max, running_sum, acc = softmax_step(
                scores, v, running_max, running_sum, acc, WIDEN
            )
    return running_max, running_sum, acc, acc_odd
