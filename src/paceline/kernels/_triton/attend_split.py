"""One split of the keys of a decode, of a request's own or of a prefix that many share."""

import triton
import triton.language as tl

from paceline.kernels._triton.primitives import (
    dot,
    load_rows,
    lookup_pages,
    scores_log2,
    softmax_finish,
    softmax_step,
)


@triton.jit
def attend_split(
    begin,  # first key of the split's first tile
    end,  # keys from here on are dead
    step,  # keys from one tile of the split to its next
    page,  # [BLOCK_KEYS] int32 page ids of the first tile
    q,  # [BLOCK_ROWS, BLOCK_DIM_K]
    k_head_ptr,  # [pages, page_size, head_dim] one KV head
    v_head_ptr,  # [pages, page_size, v_head_dim] one KV head
    page_row_ptr,  # [max_pages] int32
    max_pages,
    stride_k_page,
    stride_k_slot,
    stride_v_page,
    stride_v_slot,
    scale,
    SOFT_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """(out, log2-sum-exp2) over every `step`-th tile of keys."""
    running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
    columns = tl.arange(0, BLOCK_KEYS)
    for start in range(begin, end, step):
        next_page = lookup_pages(page_row_ptr, start + step + columns, max_pages, PAGE_SIZE)
        keys = start + columns
        live = keys < end
        slot = keys % PAGE_SIZE
        k_offsets = page.to(tl.int64) * stride_k_page + slot * stride_k_slot
        v_offsets = page.to(tl.int64) * stride_v_page + slot * stride_v_slot
        k = load_rows(k_head_ptr, k_offsets, live, DIM_K, BLOCK_DIM_K, True).to(q.dtype)
        products = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32), WIDEN)
        scores = scores_log2(products, scale, SOFT_CAP)
        scores = tl.where(live[None, :], scores, float("-inf"))
        v = load_rows(v_head_ptr, v_offsets, live, DIM_V, BLOCK_DIM_V, True).to(q.dtype)
        running_max, running_sum, acc = softmax_step(
            scores, v, running_max, running_sum, acc, WIDEN
        )
        page = next_page
    return softmax_finish(running_max, running_sum, acc)


@triton.jit
def chunks_of(
    shared_len,
    chunks,  # at most
    CHUNK_KEYS: tl.constexpr,
):
    """How many chunks a shared prefix is dealt to; of none 0."""
    return tl.minimum(chunks, tl.cdiv(shared_len, CHUNK_KEYS))
