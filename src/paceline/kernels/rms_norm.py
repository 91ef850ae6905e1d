"""RMS normalisation over the last dimension, alone or after adding the residual.

out = x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467).  The rounding
follows transformers: with a plain weight the normalised row is rounded to the model's dtype before
the product (Llama, Qwen); with `wide` the product is taken in float32 and rounded once (gpt-oss,
OLMo 2); with `unit_offset` it is so too, and the factor is 1 + weight (Gemma).
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import Run, define_op


class RowScale(NamedTuple):
    """The scale of an RMS norm, of rows whose squares another kernel summed."""

    squares: Tensor  # [tokens, parts]  float32  which together are the sum of a row's
    size: int  # numbers of a row
    eps: float

    def of(self, x: Tensor) -> Tensor:
        """x [tokens, dim] in any dtype -> [tokens, dim] float32: its rows, scaled."""
        total = self.squares.sum(1, keepdim=True)
        return x.float() * torch.rsqrt(total / self.size + self.eps)


UNSCALED = (None, 1, 0.0)  # what an operator is given in place of a RowScale


def _row_scale(squares: Tensor | None, size: int, eps: float) -> RowScale | None:
    """Of an operator's arguments."""
    return None if squares is None else RowScale(squares, size, eps)


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    wide: bool = False,
    mean_square: Tensor | None = None,
) -> Tensor:
    """The definition.  x: [..., dim]; weight: [dim]; returns [..., dim] in x's dtype.

    mean_square: [..., 1] float32, of rows of which x has a part; None: x has them whole.
    """
    row = x.float()
    if mean_square is None:
        mean_square = row.pow(2).mean(-1, keepdim=True)
    normed = row * torch.rsqrt(mean_square + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    if wide:
        return (normed * weight.float()).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    wide: bool = False,
    scale: RowScale | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition.  Returns (normalised sum, sum), both in residual's dtype; mutates nothing."""
    if scale is not None:
        total = (residual + scale.of(x)).to(residual.dtype)
    else:
        total = residual + (x if x.dim() == residual.dim() else x.sum(0).to(residual.dtype))
    normed = rms_norm_reference(total, weight, eps, unit_offset=unit_offset, wide=wide)
    return normed, total


def bind_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool,
    wide: bool,
    out: Tensor,
    *,
    addend: Tensor | None = None,
    scale: RowScale | None = None,
) -> Run:
    """The CPU's kernel, in few operators, of which each costs more than the arithmetic of a row.

    addend: as x, which it is added to in place before; None: nothing is; scale: of its rows.
    """
    row = x if x.dtype == torch.float32 else torch.empty(x.shape, dtype=torch.float32)
    norm = row.new_empty(*x.shape[:-1], 1)
    share = 1.0 / x.shape[-1]
    in_float32 = unit_offset or wide or row is x  # nothing is rounded before the product
    normed = row if in_float32 and row is not x else out

    def run() -> None:
        if addend is not None and scale is not None:
            x.copy_(x + scale.of(addend))
        elif addend is not None:
            x.add_(addend)
        if row is not x:
            row.copy_(x)
        torch.linalg.vector_norm(row, dim=-1, keepdim=True, out=norm)
        torch.addcmul(_constant(eps), norm, norm, value=share, out=norm)
        norm.rsqrt_()
        torch.mul(row, norm, out=normed)
        torch.mul(normed, weight.float() + 1.0 if unit_offset else weight, out=out)

    return run


@cache
def _constant(value: float) -> Tensor:
    """[] float32"""
    return torch.tensor(value)


def _bind_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool,
    wide: bool,
    squares: Tensor | None,
    size: int,
    scale_eps: float,
    out: Tensor,
) -> Run:
    if x.dim() == residual.dim():
        scale = _row_scale(squares, size, scale_eps)
        return bind_rms_norm(residual, weight, eps, unit_offset, wide, out, addend=x, scale=scale)
    total = torch.empty_like(residual)
    norm = bind_rms_norm(residual, weight, eps, unit_offset, wide, out, addend=total)

    def run() -> None:
        total.copy_(x.sum(0))
        norm()

    return run


def _rms_norm_cuda(
    x: Tensor, weight: Tensor, eps: float, unit_offset: bool, wide: bool, out: Tensor
) -> None:
    from paceline.kernels._triton.rms_norm import launch_rms_norm

    launch_rms_norm(x, None, weight, eps=eps, unit_offset=unit_offset, wide=wide, out=out)


def _add_rms_norm_cuda(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool,
    wide: bool,
    squares: Tensor | None,
    size: int,
    scale_eps: float,
    out: Tensor,
) -> None:
    from paceline.kernels._triton.rms_norm import launch_rms_norm

    scale = _row_scale(squares, size, scale_eps)
    launch_rms_norm(
        x, residual, weight, eps=eps, unit_offset=unit_offset, wide=wide, out=out, scale=scale
    )


_RMS_NORM = define_op(
    "rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset, bool wide, "
    "Tensor(a!) out) -> ()",
    bind=bind_rms_norm,
    cuda=_rms_norm_cuda,
)
_ADD_RMS_NORM = define_op(
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, bool unit_offset, "
    "bool wide, Tensor? squares, int size, float scale_eps, Tensor(b!) out) -> ()",
    bind=_bind_add_rms_norm,
    cuda=_add_rms_norm_cuda,
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    wide: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise the last dimension of x.

    x: [tokens, dim] or [tokens, heads, dim], rows may be strided, the last dimension contiguous;
    weight: [dim] in x's dtype; out: as x, may be x itself; allocated when None.  Mutates only
    `out` and returns it.  Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    _check_rows(x, weight)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        _check_like("out", out, x)
    _RMS_NORM(x, weight, eps, unit_offset, wide, out)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    wide: bool = False,
    scale: RowScale | None = None,
) -> Tensor:
    """residual += x in the model's dtype, then normalise the sum into a new tensor.

    x, residual: [tokens, dim]; weight: [dim] in x's dtype; scale: which x is multiplied with
    before, in float32.  Or x: [parts, tokens, dim] float32, contiguous and without a scale, whose
    sum is rounded to residual's dtype before.  Mutates `residual`.  Graph-safe.  Raises
    KernelArgumentError.
    """
    if x.dim() > residual.dim() and scale is None:
        _check_parts(x, residual)
        check_add_rms_norm(residual, residual, weight)
    else:
        check_add_rms_norm(x, residual, weight)
    if scale is not None:
        _check_squares(scale.squares, x)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _ADD_RMS_NORM(x, residual, weight, eps, unit_offset, wide, *(scale or UNSCALED), out)
    return out


def check_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raise KernelArgumentError for what `add_rms_norm` does not take."""
    _check_rows(x, weight)
    _check_like("residual", residual, x)


def _check_parts(parts: Tensor, residual: Tensor) -> None:
    shape = (parts.shape[0], *residual.shape)
    is_like = parts.dtype == torch.float32 and parts.device == residual.device
    if parts.shape != shape or not is_like or not parts.is_contiguous():
        reject(
            "x",
            expected=f"like residual, or contiguous float32 [parts, {list(residual.shape)}]",
            got=parts,
            remedy="give it what linear_parts returns",
        )


def _check_rows(x: Tensor, weight: Tensor) -> None:
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        reject(
            "x",
            expected="[tokens, dim] or [tokens, heads, dim] with a contiguous last dimension",
            got=x,
            remedy="pass a view whose last stride is 1",
        )
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or weight.device != x.device:
        reject(
            "weight",
            expected=f"{x.dtype} [{x.shape[-1]}] on {x.device}",
            got=weight,
            remedy="load the norm's weight in the model's dtype",
        )


def _check_squares(squares: Tensor, x: Tensor) -> None:
    is_made = squares.dtype == torch.float32 and squares.is_contiguous()
    if not is_made or squares.dim() != 2 or squares.shape[0] != x.shape[0]:
        reject(
            "squares",
            expected=f"contiguous float32 [{x.shape[0]}, parts]",
            got=squares,
            remedy="pass what the kernel that made the rows summed",
        )


def _check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    same = tensor.shape == x.shape and tensor.dtype == x.dtype and tensor.device == x.device
    if not same or tensor.stride(-1) != 1:
        reject(
            name,
            expected=f"{x.dtype} {list(x.shape)} on {x.device} with a contiguous last dimension",
            got=tensor,
            remedy="give it the shape and dtype of x",
        )
