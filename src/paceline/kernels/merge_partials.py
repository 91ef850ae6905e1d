"""merge_partials: two attentions of the same queries over disjoint keys become one over all.

With l = ln(sum of exp(score)) of each part and s the sink, a score without a value:

    lse = ln(e^la + e^lb)         out = (e^la * a + e^lb * b) / (e^la + e^lb + e^s)

(online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; sinks: arXiv:2309.17453).  A part
without a visible key has l = −inf and weight 0, whatever its `out` holds.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def merge_partials_reference(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, in lse_a's dtype; returns (out, lse) and mutates nothing.

    out_a, out_b: [tokens, heads, v_head_dim]; lse_a, lse_b: [tokens, heads]; sinks: [heads].
    Where no part sees a key, out is 0 and lse −inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype))
    out = torch.zeros_like(out_a, dtype=lse.dtype)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        is_empty = (part_lse == float("-inf")).unsqueeze(-1)
        weight = torch.exp(part_lse - total).unsqueeze(-1)
        out += torch.where(is_empty, 0.0, weight * part.to(lse.dtype))
    return out, lse


def merge_partials(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge two partial attentions by their log-sum-exp; sinks enter the denominator once.

    out_a, out_b: [tokens, heads, v_head_dim] in float32, bfloat16 or float16, maybe different,
    their last dimension contiguous; lse_a, lse_b: contiguous [tokens, heads] float32 natural log;
    sinks: [heads] float32.  Mutates out, of the same shape, and lse, which never counts a sink;
    they may be out_a and lse_a or out_b and lse_b.  Computes in float32.
    Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    shape = tuple(out_a.shape)
    for name, partial in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        _check_partial(name, partial, out_a, shape)
    for name, logs in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        _check_float32(name, logs, out_a, shape[:2])
    if sinks is not None:
        _check_float32("sinks", sinks, out_a, shape[1:2])
    if out.numel() == 0:
        return
    _MERGE_PARTIALS(out_a, lse_a, out_b, lse_b, sinks, out, lse)


def _check_partial(name: str, partial: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    fits = partial.dim() == 3 and tuple(partial.shape) == shape and partial.dtype in _DTYPES
    if not fits or partial.device != like.device or partial.stride(-1) != 1:
        reject(
            name,
            expected=f"float32, bfloat16 or float16 {list(shape)} on {like.device}, [tokens, heads,"
            " v_head_dim] with a contiguous last dimension",
            got=partial,
            remedy="pass the outputs of two attentions of the same queries",
        )


def _check_float32(name: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    fits = tuple(tensor.shape) == shape and tensor.dtype == torch.float32
    if not fits or tensor.device != like.device or not tensor.is_contiguous():
        reject(
            name,
            expected=f"contiguous float32 {list(shape)} on {like.device}",
            got=tensor,
            remedy="pass natural logarithms as [tokens, heads], and one sink per head",
        )


def _merge_partials_cpu(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    merged, total = merge_partials_reference(out_a, lse_a, out_b, lse_b, sinks=sinks)
    out.copy_(merged)
    lse.copy_(total)


def _merge_partials_cuda(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    from paceline.kernels._triton.merge_partials import launch_merge_partials

    launch_merge_partials(out_a, lse_a, out_b, lse_b, sinks=sinks, out=out, lse=lse)


_MERGE_PARTIALS = define_op(
    "merge_partials(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor? sinks, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_merge_partials_cpu,
    cuda=_merge_partials_cuda,
)
