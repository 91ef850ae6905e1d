"""Everything between the QKV projection and attention, in one launch: per-head norms of q and k,
rotation in place, and K and V into the paged pool; where nothing is cached, the former alone.

Each part is defined in its own file (`rms_norm`, `rope`, `write_kv`) and rounds to the model's
dtype as if it ran alone, so the fused result is their composition.
"""

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._check import reject
from paceline.kernels.custom_op import Run, define_op
from paceline.kernels.rms_norm import bind_rms_norm, rms_norm_reference
from paceline.kernels.rope import Rope, bind_rope, rope_reference
from paceline.kernels.write_kv import bind_write_kv, write_kv_reference


class HeadNorms(NamedTuple):
    """RMS norms over each head of q and k, before the rotation."""

    q: Tensor  # [head_dim]  q's dtype
    k: Tensor  # [head_dim]  q's dtype
    eps: float
    unit_offset: bool  # the factor is 1 + weight


_NOWHERE = (None,) * 5  # in place of KVSlots


class KVSlots(NamedTuple):
    """Where the K and V of a step go."""

    k_cache: Tensor  # [num_pages, page_size, kv_heads, head_dim]  k's dtype or float8_e4m3fn
    v_cache: Tensor | None  # [num_pages, page_size, kv_heads, v_head_dim]  as k_cache; None
    # where V is in K
    loc: Tensor  # [tokens]  int64  slots (trusted: they are on the device)
    k_scale: Tensor | None  # [1]  float32  with a float8 cache only: true K = stored * scale
    v_scale: Tensor | None  # [1]  float32


def rope_write_kv_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    into: KVSlots | None,
    rope: Rope | None,
    norms: HeadNorms | None,
) -> None:
    """The definition; shapes and mutation as `rope_write_kv`."""
    if norms is not None:
        for x, weight in ((q, norms.q), (k, norms.k)):
            x.copy_(rms_norm_reference(x, weight, norms.eps, unit_offset=norms.unit_offset))
    if rope is not None:
        for x in (q, k):
            x.copy_(rope_reference(x, *rope))
    if into is None:
        return
    write_kv_reference(k, into.k_cache, into.loc, into.k_scale)
    if v is not None and into.v_cache is not None:
        write_kv_reference(v, into.v_cache, into.loc, into.v_scale)


def _bind_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    rope_start: int,
    axis_columns: list[int],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    unit_offset: bool,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    loc: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Run:
    parts = []
    if q_norm is not None and k_norm is not None:
        parts.append(bind_rms_norm(q, q_norm, eps, unit_offset, False, q))
        parts.append(bind_rms_norm(k, k_norm, eps, unit_offset, False, k))
    if cos_sin is not None and positions is not None:
        starts, stops, steps = (axis_columns[i::3] for i in range(3))
        columns = [*map(range, starts, stops, steps)]
        parts += bind_rope(q, k, cos_sin, positions, rope_start, columns)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if x is not None and cache is not None and loc is not None:
            parts.append(bind_write_kv(x, cache, loc, scale))

    def run() -> None:
        for part in parts:
            part()

    return run


def _rope_write_kv_cuda(*arguments: Any) -> None:
    from paceline.kernels._triton.rope_write_kv import launch_rope_write_kv

    launch_rope_write_kv(*arguments)


_ROPE_WRITE_KV = define_op(
    "rope_write_kv(Tensor(a!) q, Tensor(b!) k, Tensor? v, Tensor? cos_sin, Tensor? positions, "
    "int rope_start, int[] axis_columns, Tensor? q_norm, Tensor? k_norm, float eps, "
    "bool unit_offset, Tensor(c!)? k_cache, Tensor(d!)? v_cache, Tensor? loc, Tensor? k_scale, "
    "Tensor? v_scale) -> ()",
    bind=_bind_rope_write_kv,
    cuda=_rope_write_kv_cuda,
)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    into: KVSlots | None,
    rope: Rope | None,
    norms: HeadNorms | None,
) -> None:
    """Normalise and rotate q and k in place, where asked, and write K and V to their slots; into
    None: nothing is written, and v is left out.

    q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], v: [tokens, kv_heads,
    v_head_dim], one dtype, rows may be strided (slices of a fused QKV output); a rope narrower than
    head_dim turns its first or last dimensions and leaves the rest as it is.  Without v, and then
    without into.v_cache, K alone is written.  Mutates q, k and the caches.  Tokens that share a
    slot (padding) leave any one of their values.  Graph-safe: the grid depends on shapes only.
    Raises KernelArgumentError.
    """
    _check_heads(q, k, v)
    if rope is not None:
        _check_rope(q, rope)
    if norms is not None:
        _check_norm("norms.q", norms.q, q)
        _check_norm("norms.k", norms.k, q)
    _check_slots(k, v, into)
    rotation = (None, None, 0, ()) if rope is None else (*rope[:3], rope.flat_columns)
    weights = (None, None, 0.0, False) if norms is None else norms
    _ROPE_WRITE_KV(q, k, v, *rotation, *weights, *(into or _NOWHERE))


def _check_slots(k: Tensor, v: Tensor | None, into: KVSlots | None) -> None:
    if into is None:
        if v is not None:
            remedy = "leave v out where nothing is written"
            reject("v", expected="None without slots to write to", got=v, remedy=remedy)
        return
    _check_cache("k", k, into.k_cache, into.k_scale)
    if v is not None and into.v_cache is not None:
        _check_cache("v", v, into.v_cache, into.v_scale)
    elif v is not into.v_cache:
        reject(
            "v_cache",
            expected="given with v, and None without it",
            got=into.v_cache,
            remedy="pass v and its cache, or neither where the cache has V in K",
        )
    if into.loc.shape != k.shape[:1] or into.loc.dtype != torch.int64:
        reject(
            "loc",
            expected=f"int64 [{k.shape[0]}]",
            got=into.loc,
            remedy="pass the group's out_cache_loc of this step",
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    v = k if v is None else v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.stride(2) != 1:
            reject(
                name,
                expected="[tokens, heads, dim] with a contiguous last dimension",
                got=x,
                remedy="view the projection as heads first",
            )
    tokens, _, dim = q.shape
    for name, x, shape in (("k", k, (tokens, k.shape[1], dim)), ("v", v, (tokens, *v.shape[1:]))):
        is_one = x.shape[0] == tokens and x.shape[1] == k.shape[1] and tuple(x.shape) == shape
        if not is_one or x.dtype != q.dtype or x.device != q.device:
            reject(
                name,
                expected=f"{q.dtype} [{tokens}, {k.shape[1]}, {shape[2]}] on {q.device}",
                got=x,
                remedy="take q, k and v from the same projection",
            )


def _check_rope(q: Tensor, rope: Rope) -> None:
    (tokens, _, dim), table = q.shape, rope.cos_sin
    fits = table.dim() == 2 and table.shape[1] % 2 == 0 and table.shape[1] <= dim
    if not fits or table.dtype != torch.float32 or not table.is_contiguous():
        reject(
            "cos_sin",
            expected=f"contiguous float32 [max_position, rotary_dim], rotary_dim even and <= {dim}",
            got=table,
            remedy="build it with layers.rope",
        )
    if rope.start not in (0, dim - table.shape[1]):
        raise KernelArgumentError.about(
            "rope.start",
            expected=f"0 or {dim - table.shape[1]}, the last {table.shape[1]} dimensions",
            got=rope.start,
            remedy="lay out the head so that what turns is at one of its ends",
        )
    axes, shape = len(rope.axis_columns), rope.positions.shape
    if shape not in ((tokens,), (axes, tokens)) or rope.positions.dtype != torch.int64:
        reject(
            "positions",
            expected=f"int64 [{tokens}]" + (f" or [{axes}, {tokens}]" if axes else ""),
            got=rope.positions,
            remedy="pass the step's rope_positions",
        )
    pairs = table.shape[1] // 2
    if axes and {*chain.from_iterable(rope.axis_columns)} != {*range(pairs)}:
        raise KernelArgumentError.about(
            "rope.axis_columns",
            expected=f"each of {pairs} pairs of dimensions on some axis, and no other",
            got=rope.axis_columns,
            remedy="give the rope sections of rotary_dim / 2 in all",
        )


def _check_norm(name: str, weight: Tensor, q: Tensor) -> None:
    if weight.shape != q.shape[2:] or weight.dtype != q.dtype or weight.device != q.device:
        reject(
            name,
            expected=f"{q.dtype} [{q.shape[2]}] on {q.device}",
            got=weight,
            remedy="load the norm's weight in the model's dtype",
        )


def _check_cache(name: str, x: Tensor, cache: Tensor, scale: Tensor | None) -> None:
    fits = cache.dim() == 4 and cache.shape[2:] == x.shape[1:] and cache.stride(3) == 1
    dtype = x.dtype if scale is None else torch.float8_e4m3fn
    if not fits or cache.dtype != dtype or cache.device != x.device:
        reject(
            f"{name}_cache",
            expected=f"{dtype} [num_pages, page_size, {x.shape[1]}, {x.shape[2]}] on {x.device}",
            got=cache,
            remedy="allocate the pool in the model's dtype, or in float8_e4m3fn with scales",
        )
    if scale is not None and (scale.shape != (1,) or scale.dtype != torch.float32):
        reject(
            f"{name}_scale",
            expected="float32 [1]",
            got=scale,
            remedy="pass the pool's scale of this layer",
        )
