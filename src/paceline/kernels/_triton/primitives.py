"""Small jitted helpers that several kernels share."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh of a float32 tile; exp never overflows."""
    decay = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def gated_activation(
    gate,
    up,  # like gate
    ACTIVATION: tl.constexpr,  # one of kernels.act_and_mul.ACTIVATIONS
):
    """act(gate) * up in float32; as in transformers, act is rounded to gate's dtype before."""
    g = gate.to(tl.float32)
    if ACTIVATION == "silu":
        activated = g * tl.sigmoid(g)
    elif ACTIVATION == "relu":
        activated = tl.where(g < 0.0, 0.0, g)  # NaN stays
    elif ACTIVATION == "gelu":
        activated = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        activated = 0.5 * g * (1.0 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
    return activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def quick_activation(
    x,  # float32
    ACTIVATION: tl.constexpr,  # one of kernels.act_and_mul.ACTIVATIONS
):
    """act(x) for where instructions count.  All but relu is x / (1 + 2^-p): x times the logistic
    function of p ln 2, where silu has x, and the form of gelu with tanh twice the argument of that,
    for (1 + tanh(z)) / 2 = 1 / (1 + e^-2z).  Of gelu p is x times a polynomial in x², fitted to
    log2(Phi(x) / Phi(-x)) by weighted least squares up to |x| = 6, where act(x) is x or 0 to
    1e-8: it errs by 4.2e-5 at most, and by a quarter of half a bfloat16 unit and 1e-6 at most.  Of
    every x: what overflows is 2^-p, and x over infinity is 0; of infinities and NaN as torch's."""
    if ACTIVATION == "relu":
        activated = tl.where(x < 0.0, 0.0, x)  # NaN stays
    else:
        square = x * x
        if ACTIVATION == "silu":
            slope = 1.4426950408889634
        elif ACTIVATION == "gelu_tanh":
            slope = 0.1029432395800235 * square + 2.302208198144325
        else:
            tl.static_assert(ACTIVATION == "gelu")
            slope = 1.1269352171439095e-06 * square - 3.156940147164278e-05
            slope = slope * square - 0.0008476654184050858
            slope = slope * square + 0.10673131048679352
            slope = slope * square + 2.3007893562316895
        activated = x / (1.0 + tl.exp2(-x * slope))
    return activated


@triton.jit
def swiglu(
    gate,  # float32
    up,  # like gate
    alpha,
    up_offset,
    LIMIT: tl.constexpr,
):
    """gate' sigmoid(alpha gate') (up' + up_offset); see kernels/moe_experts.py."""
    if LIMIT is not None:
        # A comparison, not a minimum: a NaN stays one.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate * tl.sigmoid(alpha * gate) * (up + up_offset)


@triton.jit
def taken(
    x,  # [size]
    index: tl.constexpr,
):
    """x[index].  Where each thread has all of x, as behind a sum over columns along which all warps
    lie, nothing moves."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == index, x, 0.0), axis=0)


@triton.jit
def biased_activation(
    acc,  # float32, of a product
    up,  # the same, used when ACTIVATION
    bias_ptr,  # [out_features], with ACTIVATION [2 * out_features], or None
    features,  # like acc, or to broadcast with it
    live,  # like acc
    out_features,
    ACTIVATION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Bias and activation, rounded where the separate operations round."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + features, mask=live, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + out_features + features, mask=live, other=0.0).to(tl.float32)
        acc = gated_activation(acc.to(DTYPE), up.to(DTYPE), ACTIVATION)
    return acc.to(DTYPE)


@triton.jit
def narrow_query(
    q,  # [rows, dim] in the model's dtype
    scale,
):
    """(q, scale) for products with 8-bit keys, which become float16 in one instruction and bfloat16
    only by way of float32: q in float16, its rows divided by a power of two near their largest
    number, which loses nothing."""
    if q.dtype == tl.float32:
        return q, scale
    else:
        wide = q.to(tl.float32)
        largest = tl.max(tl.abs(wide), axis=1)
        unit = tl.exp2(tl.floor(tl.log2(tl.where(largest > 0.0, largest, 1.0))))
        return (wide / unit[:, None]).to(tl.float16), scale * unit[:, None]


@triton.jit
def scores_log2(
    products,  # [rows, keys] float32 q.k
    scale,  # a number, or [rows, 1]
    SOFT_CAP: tl.constexpr,
):
    """Scaled and capped scores in units of log2, so that exp2 gives the softmax numerator."""
    if SOFT_CAP is None:
        return products * (scale * 1.4426950408889634)
    else:
        return tanh(products * (scale / SOFT_CAP)) * (SOFT_CAP * 1.4426950408889634)


@triton.jit
def lookup_pages(
    page_row_ptr,  # [max_pages] int32 one request's page ids
    positions,  # [keys] int32 absolute positions
    max_pages,
    PAGE_SIZE: tl.constexpr,
):
    """[keys] int32 page id of each position, live or not; 0 behind the table's end.

    A loop carries the ids of its next tile: looked up one tile ahead, they keep no load waiting.
    """
    column = positions // PAGE_SIZE
    return tl.load(page_row_ptr + column, mask=column < max_pages, other=0)


@triton.jit
def load_rows(
    base_ptr,  # [pages, page_size, dim] one KV head
    offsets,  # [keys] int64 offset of each key's row
    live,  # [keys] bool, used when MASKED
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[keys, BLOCK_DIM] rows of a cache; dead keys and padded dimensions are 0, never read."""
    cols = tl.arange(0, BLOCK_DIM)
    ptrs = base_ptr + offsets[:, None] + cols[None, :]
    if MASKED and DIM == BLOCK_DIM:
        rows = tl.load(ptrs, mask=live[:, None], other=0.0)
    elif MASKED:
        rows = tl.load(ptrs, mask=live[:, None] & (cols < DIM)[None, :], other=0.0)
    elif DIM == BLOCK_DIM:
        rows = tl.load(ptrs)
    else:
        rows = tl.load(ptrs, mask=(cols < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def dot(
    a,  # [rows, inner]
    b,  # [inner, cols]
    acc,  # [rows, cols] float32
    WIDEN: tl.constexpr,
):
    """acc + a @ b in float32.  WIDEN: the interpreter would multiply bfloat16 as bit patterns."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def softmax_step(
    scores,  # [rows, keys] float32 log2 units, −inf where masked
    v,  # [keys, BLOCK_DIM_V]
    running_max,  # [rows] float32
    running_sum,  # [rows] float32
    acc,  # [rows, BLOCK_DIM_V] float32
    WIDEN: tl.constexpr,
):
    """One tile of the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).

    A row that has seen no key keeps maximum −inf, sum 0 and accumulator 0.
    """
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(running_max - finite_max)
    running_sum = running_sum * decay + tl.sum(weights, axis=1)
    acc = dot(weights.to(v.dtype), v, acc * decay[:, None], WIDEN)
    return new_max, running_sum, acc


@triton.jit
def softmax_finish(
    running_max,  # [rows] float32
    running_sum,  # [rows] float32
    acc,  # [rows, BLOCK_DIM_V] float32
):
    """(out, log2-sum-exp2); a row without keys gives 0 and −inf."""
    empty = running_sum == 0.0
    safe_sum = tl.where(empty, 1.0, running_sum)
    out = acc / safe_sum[:, None]
    lse = tl.where(empty, float("-inf"), running_max + tl.log2(safe_sum))
    return out, lse


@triton.jit
def apply_sinks(
    out,  # [rows, BLOCK_DIM_V] float32
    lse,  # [rows] float32, log2 units
    sinks_ptr,  # [heads] float32, natural units
    head,  # [rows]
    live,  # [rows] bool
):
    """`out` with one more score per head in its denominator; a row without keys stays 0.

    out * e^lse / (e^lse + e^sink), the attention sinks of Xiao et al. 2023, arXiv:2309.17453, as a
    learned score per head without a value.
    """
    sink = tl.load(sinks_ptr + head, mask=live, other=0.0) * 1.4426950408889634
    share = 1.0 / (1.0 + tl.exp2(sink - lse))
    return out * tl.where(lse == float("-inf"), 0.0, share)[:, None]
