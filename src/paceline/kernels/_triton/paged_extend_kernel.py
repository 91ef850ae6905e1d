"""The Triton kernel of paged_extend; see kernels/paged_attention/extend.py.  What it does with one
tile of keys is in extend_keys.py.

Worked example, GROUP 4, BLOCK_ROWS 16, BLOCK_KEYS 8, prefix 10, extend 5, no window: rows are
(query, head) pairs, so tile 0 holds queries 0..3 at positions 10..13 and tile 1 query 4 at 14.
Tile 0 sees keys [0, 14): [0, 8) lies before position 11 for every row and takes no mask, [8, 14)
is masked row by row.

In a ragged step only tiles that may hold rows get a program, in slots; and requests of 16 rows or
less, decodes in company of prompts, have small tiles, in a launch of their own, whose programs run
beside those of the first, and of few requests share their keys:

    BLOCK_ROWS 4, GROUP 1, cu_seqlens_q [0, 6, 7, 12]
    request   0 0 0 1 2 2 2      first slot of r: cu_seqlens_q[r] * GROUP // BLOCK_ROWS + r, so the
    tile      0 1 - 0 0 1 -      slots of a request are enough for its tiles, and at most one more
"""

import triton
import triton.language as tl

from paceline.kernels._triton.extend_keys import attend_keys
from paceline.kernels._triton.latent_keys import latent_finish, load_parts, zero_parts
from paceline.kernels._triton.launch import let_next_start, wait_for_inputs
from paceline.kernels._triton.primitives import (
    apply_sinks,
    lookup_pages,
    narrow_query,
    softmax_finish,
)
from paceline.kernels._triton.scaled_latents import laid_down, narrow_parts, twos_of_parts
from paceline.kernels._triton.split_merge import (
    finishes_last,
    merge_splits,
    store_partial,
    store_partial_columns,
)
from paceline.kernels._triton.visible_keys import tree_bits_of, tree_depths


@triton.jit
def _store_rows(
    out,  # [rows, BLOCK_COLS] float32
    lse,  # [rows] float32, log2 units
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    sinks_ptr,  # [heads] float32 or None
    stride_out_token,
    stride_out_head,
    heads,
    token,  # [rows] int64
    head,  # [rows] int64
    row_live,  # [rows] bool
    FIRST: tl.constexpr,  # column of `out`
    DIM_V: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Some columns of the result of some rows, and with the first ones the rest, in natural
    units."""
    if sinks_ptr is not None:
        out = apply_sinks(out, lse, sinks_ptr, head, row_live)
    cols = FIRST + tl.arange(0, BLOCK_COLS)
    tl.store(
        out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + cols[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_live[:, None] & (cols < DIM_V)[None, :],
    )
    if FIRST == 0:
        tl.store(lse_ptr + token * heads + head, lse * 0.6931471805599453, mask=row_live)


@triton.jit
def _request_of(
    slot,
    cu_seqlens_q_ptr,  # [reqs + 1] int32
    num_reqs,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The last request whose first slot is not behind `slot`."""
    before = 0
    for start in range(0, num_reqs, AT_ONCE):
        reqs = start + tl.arange(0, AT_ONCE)
        is_req = reqs < num_reqs
        begins = tl.load(cu_seqlens_q_ptr + reqs, mask=is_req, other=0)
        is_before = is_req & (begins * GROUP // BLOCK_ROWS + reqs <= slot)
        before += tl.sum(is_before.to(tl.int32), axis=0)
    return before - 1


@triton.jit
def _end_behind_leader(IS_EARLY: tl.constexpr):
    """A launch that did not wait for the one before ends behind it: whoever waits for this one, or
    starts when it has ended, finds both done.  One program that waits is enough, and the others
    leave their place to those that have work: of splits the one that merges."""
    if tl.program_id(0) + tl.program_id(1) == 0:
        wait_for_inputs(IS_EARLY)


@triton.jit(do_not_specialize=["splits", "num_reqs", "above", "most"])
def paged_extend_kernel(
    q_ptr,  # [tokens, heads, head_dim]
    k_cache_ptr,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache_ptr,  # [num_pages, page_size, kv_heads, v_head_dim]
    page_table_ptr,  # [reqs, max_pages] int32
    prefix_lens_ptr,  # [reqs] int32
    kv_lens_ptr,  # [reqs] int32
    cu_seqlens_q_ptr,  # [reqs + 1] int32
    tree_mask_ptr,  # [tokens, max_extend_len] bool or None
    visible_end_ptr,  # [tokens] int32 or None
    k_scale_ptr,  # [1] float32 or None
    v_scale_ptr,  # [1] float32 or None
    turned_ptr,  # [num_pages, page_size, 1, DIM_REST] or None
    row_scale_ptr,  # [num_pages, page_size, 1, 1] float32 or None
    sinks_ptr,  # [heads] float32 or None
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    partial_out_ptr,  # [tokens * splits, heads, v_head_dim] float32 or None; where it FOLLOWS of
    # the tokens that tiles of all requests have room for
    partial_lse_ptr,  # [tokens * splits, heads] float32, log2 units, or None; likewise
    finished_ptr,  # [tiles * kv_heads] int32, of all requests, 0 between launches, or None
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_turned_page,
    stride_turned_slot,
    stride_row_scale_page,
    stride_row_scale_slot,
    stride_page_table_req,
    max_pages,
    stride_tree_token,
    stride_out_token,
    stride_out_head,
    heads,
    scale,
    splits,
    num_reqs,
    above,  # requests of so many rows or less are another launch's
    most,  # and those of more
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    NODES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PREFIX_ONLY: tl.constexpr,
    IN_SLOTS: tl.constexpr,  # the first axis counts slots, the second KV heads
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IN_PAGE: tl.constexpr,  # a tile of keys lies in one page
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    DIM_REST: tl.constexpr,  # columns of K behind DIM_K; 0 unless V lies in K
    BLOCK_REST: tl.constexpr,
    V_IN_K: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,  # codes are read by twos, and queries and sums are in two halves
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    LOADS_FIRST: tl.constexpr,  # a tile's are started before the products of the one before
    LOOP_STAGES: tl.constexpr,  # of a loop that LOADS_FIRST, else None
    WIDEN: tl.constexpr,
    LEADS: tl.constexpr,  # the launch behind is of other requests of the same call
    FOLLOWS: tl.constexpr,  # the one before is
    OVERLAPPED: tl.constexpr,
):
    if not FOLLOWS:
        wait_for_inputs(OVERLAPPED)
    if LEADS:  # what both read is there, and neither reads what the other writes
        let_next_start(OVERLAPPED)
    # The last tile has the most keys under a causal mask: it starts first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_heads = heads // GROUP
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    if IN_SLOTS:
        req = _request_of(tile, cu_seqlens_q_ptr, num_reqs, GROUP, BLOCK_ROWS, 128).to(tl.int64)
    else:
        req = (tl.program_id(1) // kv_heads).to(tl.int64)
    split = tl.program_id(2)  # slowest: the splits that leave at once start last

    token_begin = tl.load(cu_seqlens_q_ptr + req)
    if IN_SLOTS:
        tile -= token_begin * GROUP // BLOCK_ROWS + req.to(tl.int32)
    extend_len = tl.load(cu_seqlens_q_ptr + req + 1) - token_begin
    prefix_len = tl.load(prefix_lens_ptr + req)
    end = prefix_len
    if not PREFIX_ONLY:
        end = tl.load(kv_lens_ptr + req)

    num_rows = extend_len * GROUP
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_live = row < num_rows
    query_position = prefix_len + row // GROUP
    token = (token_begin + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    tree_bits = token
    visible_end = query_position
    first_position = prefix_len + tile * BLOCK_ROWS // GROUP
    if MASK == "tree":
        first_position = prefix_len
        if NODES is not None:
            tree_bits = tree_bits_of(
                tree_mask_ptr, token, row_live, extend_len, stride_tree_token, NODES
            )
        if WINDOW is not None or CHUNK is not None:
            query_position = prefix_len + tree_depths(
                tree_mask_ptr, token, row_live, extend_len, stride_tree_token
            )
    elif MASK == "block":
        visible_end = tl.load(visible_end_ptr + token, mask=row_live, other=0)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    if CHUNK is not None:
        begin = first_position // CHUNK * CHUNK
    # Tiles are dealt to the splits in turn, as in a decode; a single one masks only its last tiles.
    first = begin + split * BLOCK_KEYS
    page_row_ptr = page_table_ptr + req * stride_page_table_req
    columns = 0 if IN_PAGE else tl.arange(0, BLOCK_KEYS)
    page = lookup_pages(page_row_ptr, first + columns, max_pages, PAGE_SIZE)
    cols_k = tl.arange(0, BLOCK_DIM_K)
    q_rows = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None]
    if PARTS > 1:
        zero = tl.zeros([BLOCK_ROWS], tl.int64)
        q = load_parts(q_rows, zero, row_live, DIM_K, BLOCK_DIM_K, PARTS, True)
    else:
        q = tl.load(
            q_rows + cols_k[None, :], mask=row_live[:, None] & (cols_k < DIM_K)[None, :], other=0.0
        )
        if V_IN_K:
            q = (q,)
    q_rest = None
    if DIM_REST > 0:
        cols_rest = tl.arange(0, BLOCK_REST)
        is_rest = row_live[:, None] & (cols_rest < DIM_REST)[None, :]
        q_rest = tl.load(q_rows + (DIM_K + cols_rest)[None, :], mask=is_rest, other=0.0)
    # Without a window nothing above but q waits for a length: the loads are in flight together.
    if (tile * BLOCK_ROWS >= num_rows) | (num_rows <= above) | (num_rows > most):
        if FOLLOWS:
            _end_behind_leader(OVERLAPPED)
        return

    # Keys [begin, full_end) are seen by every row, [full_end, end) are masked row by row.
    full_end = end
    if MASK == "causal":
        last_row = tl.minimum(tile * BLOCK_ROWS + BLOCK_ROWS, num_rows) - 1
        end = tl.minimum(end, prefix_len + last_row // GROUP + 1)
        full_end = tl.minimum(end, first_position + 1)
    elif MASK == "tree":
        full_end = tl.minimum(end, prefix_len)
    elif MASK == "block":  # nobody sees less than under a causal mask
        end = tl.minimum(end, tl.max(visible_end, axis=0))
        full_end = tl.minimum(end, first_position + 1)
    if CHUNK is None:
        full_end = full_end // BLOCK_KEYS * BLOCK_KEYS
    else:  # every row sees them only where no row lies in a later chunk
        is_one = tl.max(query_position, axis=0) < begin + CHUNK
        seen_by_all = tl.where(is_one, tl.maximum(full_end - begin, 0), 0)
        full_end = begin + seen_by_all // BLOCK_KEYS * BLOCK_KEYS

    live_splits = 1
    if IS_SPLIT:
        tiles = tl.cdiv(end - begin, BLOCK_KEYS)
        live_splits = tl.maximum(tl.minimum(splits, tl.cdiv(tiles, MIN_TILES)), 1)
        if split >= live_splits:
            if V_IN_K:
                nothing = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
                dead_row = (token * splits + split) * heads + head
                tl.store(partial_lse_ptr + dead_row, nothing, mask=row_live)
            return
    step = live_splits * BLOCK_KEYS

    scale_rest = scale
    if k_scale_ptr is not None:
        q, scale = narrow_query(q, scale * tl.load(k_scale_ptr))
    q_last = None
    if row_scale_ptr is not None:
        q, scale = narrow_parts(q, scale, PARTS)
        if WORDS:
            q, q_last = twos_of_parts(q, PARTS)
        elif LOADS_FIRST:
            # Its place until the answer comes: of another split's rows, what that one writes too.
            place_ptr = out_ptr.to(tl.pointer_type(q[0].dtype))
            places = place_ptr + (token * stride_out_token + head * stride_out_head)[:, None]
            is_q = row_live[:, None] & (cols_k < DIM_K)[None, :]
            q = (laid_down(q[0], places + cols_k[None, :], is_q),)
    k_head_ptr = k_cache_ptr + kv_head * stride_k_head
    v_head_ptr = v_cache_ptr + kv_head * stride_v_head
    running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    if V_IN_K:
        running_sum = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
    else:
        running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc_odd = tl.zeros([1, 1], tl.float32)
    if WORDS:
        acc = zero_parts(BLOCK_ROWS, BLOCK_DIM_V // 2, PARTS)
        acc_odd = zero_parts(BLOCK_ROWS, BLOCK_DIM_V // 2, PARTS)
    elif V_IN_K:
        acc = zero_parts(BLOCK_ROWS, BLOCK_DIM_V, PARTS)
    else:
        acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
    if not ONE_LOOP:
        for start in tl.range(first, full_end, step, num_stages=LOOP_STAGES):
            next_page = lookup_pages(page_row_ptr, start + step + columns, max_pages, PAGE_SIZE)
            running_max, running_sum, acc, acc_odd = attend_keys(
                start, page, end, query_position, token, row_live, tree_bits, visible_end,
                q, q_last, q_rest, k_head_ptr, v_head_ptr, turned_ptr, row_scale_ptr, tree_mask_ptr,
                stride_k_page, stride_k_slot, stride_v_page, stride_v_slot,
                stride_turned_page, stride_turned_slot,
                stride_row_scale_page, stride_row_scale_slot, stride_tree_token,
                token_begin, prefix_len, extend_len, running_max, running_sum, acc, acc_odd,
                scale, scale_rest,
                MASK, WINDOW, CHUNK, NODES, SOFT_CAP, PAGE_SIZE, IN_PAGE, DIM_K, DIM_V, BLOCK_DIM_K,
                BLOCK_DIM_V, DIM_REST, BLOCK_REST, V_IN_K, PARTS, WORDS, BLOCK_ROWS, BLOCK_KEYS,
                SAME_STRIDES, WIDEN, LOADS_FIRST, MASKED=False,
            )  # fmt: skip
            page = next_page
        first += tl.cdiv(tl.maximum(full_end - first, 0), step) * step
    for start in tl.range(first, end, step, num_stages=LOOP_STAGES):
        next_page = lookup_pages(page_row_ptr, start + step + columns, max_pages, PAGE_SIZE)
        running_max, running_sum, acc, acc_odd = attend_keys(
            start, page, end, query_position, token, row_live, tree_bits, visible_end,
            q, q_last, q_rest, k_head_ptr, v_head_ptr, turned_ptr, row_scale_ptr, tree_mask_ptr,
            stride_k_page, stride_k_slot, stride_v_page, stride_v_slot,
            stride_turned_page, stride_turned_slot,
            stride_row_scale_page, stride_row_scale_slot, stride_tree_token,
            token_begin, prefix_len, extend_len, running_max, running_sum, acc, acc_odd,
            scale, scale_rest,
            MASK, WINDOW, CHUNK, NODES, SOFT_CAP, PAGE_SIZE, IN_PAGE, DIM_K, DIM_V, BLOCK_DIM_K,
            BLOCK_DIM_V, DIM_REST, BLOCK_REST, V_IN_K, PARTS, WORDS, BLOCK_ROWS, BLOCK_KEYS,
            SAME_STRIDES, WIDEN, LOADS_FIRST, MASKED=True,
        )  # fmt: skip
        page = next_page

    let_next_start(OVERLAPPED)
    if V_IN_K:
        COLS: tl.constexpr = BLOCK_DIM_V // PARTS
        inverse, lse = latent_finish(running_max, tl.sum(running_sum, axis=1))
        partial_row = (token * splits + split) * heads + head
        for part in tl.static_range(PARTS):
            out = acc[part]
            if WORDS:
                out = tl.reshape(tl.join(out, acc_odd[part]), [BLOCK_ROWS, COLS])
            out *= inverse[:, None]
            if IS_SPLIT:
                store_partial_columns(
                    out, partial_out_ptr, partial_row, row_live, part * COLS, DIM_V, COLS
                )
            else:
                _store_rows(
                    out, lse, out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, heads,
                    token, head, row_live, part * COLS, DIM_V, COLS,
                )  # fmt: skip
        if IS_SPLIT:
            tl.store(partial_lse_ptr + partial_row, lse, mask=row_live)
    else:
        out, lse = softmax_finish(running_max, running_sum, acc)
        if v_scale_ptr is not None:
            out *= tl.load(v_scale_ptr)
        if IS_SPLIT:
            place = token
            if FOLLOWS:  # of few tokens anywhere in the step, which a request's tile holds
                place = req * (BLOCK_ROWS // GROUP) + row // GROUP
            first_row = place * splits * heads + head
            store_partial(
                out, lse, partial_out_ptr, partial_lse_ptr, first_row + split * heads, row_live,
                DIM_V, BLOCK_DIM_V,
            )  # fmt: skip
            count_ptr = finished_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            if not finishes_last(count_ptr, live_splits):
                return
            out, lse = merge_splits(
                partial_out_ptr, partial_lse_ptr, first_row, heads, live_splits, row_live,
                DIM_V, BLOCK_DIM_V, BLOCK_ROWS, MERGE_SPLITS,
            )  # fmt: skip
        _store_rows(
            out, lse, out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, heads,
            token, head, row_live, 0, DIM_V, BLOCK_DIM_V,
        )  # fmt: skip
    if FOLLOWS:
        _end_behind_leader(OVERLAPPED)
