"""What paged_extend does with a tile of latents: V lies in K, so its first columns are scored and
weighed, and those behind them scored alone.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.primitives import dot


@triton.jit
def latent_scores(
    q,  # [rows, BLOCK_DIM_K]
    q_rest,  # [rows, BLOCK_REST]
    k,  # [keys, BLOCK_DIM_K]
    rest,  # [keys, BLOCK_REST]
    scale,
    always,  # bool, true
    IN_HALVES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """[rows, keys] float32 q.k * scale, of two products that do not wait for each other.

    IN_HALVES: each four of eight warps score half of the keys.  Where Triton sees another product
    behind this one, each four score all: it does not look behind a condition, and with a product in
    both branches it draws nothing of what follows into them.
    """
    zeros = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    if not IN_HALVES or always:
        scores = dot(q, tl.trans(k), zeros, WIDEN) * scale
        scores += dot(q_rest, tl.trans(rest), zeros, WIDEN) * scale
    else:
        scores = dot(q_rest, tl.trans(rest), zeros, WIDEN)
    return scores


@triton.jit
def latent_step(
    scores,  # [rows, keys] float32 log2 units, −inf where masked
    v,  # [keys, BLOCK_DIM_V]
    running_max,  # [rows] float32
    running_sums,  # [rows, keys] float32: added up behind the last tile, as warps share rows
    acc,  # [rows, BLOCK_DIM_V] float32
    WIDEN: tl.constexpr,
):
    """One tile of the online softmax, as `softmax_step`."""
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(running_max - finite_max)
    running_sums = running_sums * decay[:, None] + weights
    acc = dot(weights.to(v.dtype), v, acc * decay[:, None], WIDEN)
    return new_max, running_sums, acc
