"""What paged_extend does with a tile of latents: V lies in K, so its first columns are scored and
weighed, and those behind them scored alone.

The first columns of keys, queries and sums are tuples of tiles, PARTS of them side by side.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.primitives import dot


@triton.jit
def load_parts(
    base_ptr,  # [...] rows of DIM columns
    offsets,  # [rows] of each row
    live,  # [rows] bool, used when MASKED
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """PARTS of [rows, BLOCK_DIM // PARTS]; dead rows are 0, never read."""
    WIDTH: tl.constexpr = BLOCK_DIM // PARTS
    cols = tl.arange(0, WIDTH)
    ptrs = base_ptr + (offsets[:, None] + cols[None, :])
    parts = ()
    for part in tl.static_range(PARTS):
        here = ptrs + part * WIDTH
        if DIM != BLOCK_DIM:
            mask = (cols + part * WIDTH < DIM)[None, :]
            if MASKED:
                mask &= live[:, None]
            tile = tl.load(here, mask=mask, other=0)
        elif MASKED:
            tile = tl.load(here, mask=live[:, None], other=0)
        else:
            tile = tl.load(here)
        parts += (tile,)
    return parts


@triton.jit
def zero_parts(
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """PARTS of [ROWS, BLOCK_DIM // PARTS] float32."""
    parts = ()
    for _ in tl.static_range(PARTS):
        parts += (tl.zeros([ROWS, BLOCK_DIM // PARTS], tl.float32),)
    return parts


@triton.jit
def latent_scores(
    q,  # PARTS of [rows, BLOCK_DIM_K // PARTS]
    q_rest,  # [rows, BLOCK_REST]
    k,  # PARTS of [keys, BLOCK_DIM_K // PARTS]
    rest,  # [keys, BLOCK_REST]
    scale,
    always,  # bool, true
    PARTS: tl.constexpr,
    IN_HALVES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """[rows, keys] float32 q.k * scale, of two products that do not wait for each other.

    IN_HALVES: each four of eight warps score half of the keys.  Where Triton sees another product
    behind this one, each four score all: it does not look behind a condition, and with a product in
    both branches it draws nothing of what follows into them.
    """
    zeros = tl.zeros([q_rest.shape[0], rest.shape[0]], tl.float32)
    if not IN_HALVES or always:
        scores = dot(q[0], tl.trans(k[0]), zeros, WIDEN)
        for part in tl.static_range(2, PARTS, 2):
            scores = dot(q[part], tl.trans(k[part]), scores, WIDEN)
        scores *= scale
        others = dot(q_rest, tl.trans(rest), zeros, WIDEN)
        for part in tl.static_range(1, PARTS, 2):
            others = dot(q[part], tl.trans(k[part]), others, WIDEN)
        scores += others * scale
    else:
        scores = dot(q_rest, tl.trans(rest), zeros, WIDEN)
    return scores


@triton.jit
def latent_step(
    scores,  # [rows, keys] float32 log2 units, −inf where masked
    v,  # PARTS of [keys, BLOCK_DIM_V // PARTS]
    running_max,  # [rows] float32
    running_sums,  # [rows, keys] float32: added up behind the last tile, as warps share rows
    acc,  # PARTS of [rows, BLOCK_DIM_V // PARTS] float32
    PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of the online softmax, as `softmax_step`."""
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(running_max - finite_max)
    running_sums = running_sums * decay[:, None] + weights
    weights = weights.to(v[0].dtype)
    sums = ()
    for part in tl.static_range(PARTS):
        sums += (dot(weights, v[part], acc[part] * decay[:, None], WIDEN),)
    return new_max, running_sums, sums


@triton.jit
def latent_finish(
    running_max,  # [rows] float32
    running_sum,  # [rows] float32
):
    """(1 / sum, log2-sum-exp2), as `softmax_finish`."""
    empty = running_sum == 0.0
    safe_sum = tl.where(empty, 1.0, running_sum)
    return 1.0 / safe_sum, tl.where(empty, float("-inf"), running_max + tl.log2(safe_sum))
