"""Triton kernel of gated_norm and gated_head_norm; see kernels/gated_norm.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2

_BLOCK = 1024  # numbers of a program, where a group has no more
_FEW = 32  # programs


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    y_ptr,  # [tokens, GROUPS, DIM]
    z_ptr,  # [tokens, GROUPS // SIDE_BY_SIDE, SIDE_BY_SIDE, DIM]
    weight_ptr,  # [WEIGHTS, DIM] or None
    out_ptr,  # [tokens, GROUPS, DIM], contiguous
    stride_y_token,
    stride_y_group,
    stride_z_token,
    stride_z_part,
    num_rows,
    eps,
    GROUPS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    DIM: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ARE_FEW: tl.constexpr,  # programs
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, group = row // GROUPS, row % GROUPS
    cols = tl.arange(0, BLOCK_DIM)
    mask = (row < num_rows)[:, None] & (cols < DIM)[None, :]
    if weight_ptr is not None:
        weight_ptrs = weight_ptr + (group % WEIGHTS * DIM)[:, None] + cols[None, :]
        weight = tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    # A few programs take nobody's place: what follows may ask for its weights meanwhile.
    if ARE_FEW:
        let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    if not ARE_FEW:
        let_next_start(OVERLAPPED)
    y_ptrs = y_ptr + (token * stride_y_token + group * stride_y_group)[:, None] + cols[None, :]
    given = tl.load(y_ptrs, mask=mask, other=0.0)
    part, beside = group // SIDE_BY_SIDE, group % SIDE_BY_SIDE
    in_z = token * stride_z_token + part * stride_z_part + beside * DIM
    z = tl.load(z_ptr + in_z[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = z / (1.0 + tl.exp(-z))
    found = given.to(tl.float32)
    if ORDER == "gate":
        found *= gate
    else:
        if ORDER == "gate_norm":
            found *= gate
        mean_square = tl.sum(found * found, axis=1) / DIM
        found *= (1.0 / tl.sqrt(mean_square + eps))[:, None]
        if ORDER == "gate_norm":
            found = found.to(given.dtype).to(tl.float32) * weight
        elif ORDER == "norm_gate":
            found = found * weight * gate
        else:
            found = (found.to(given.dtype).to(tl.float32) * weight).to(given.dtype)
            found = found.to(tl.float32) * gate
    out_ptrs = out_ptr + (row * DIM)[:, None] + cols[None, :]
    tl.store(out_ptrs, found.to(given.dtype), mask=mask)


def launch_gated_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int,
    order: str,
    out: Tensor,
) -> None:
    """A program for some groups of rows; arguments as checked by kernels/gated_norm.py."""
    tokens, dim = out.shape[0], out.shape[1] // groups
    parts = z.shape[1] if z.dim() == 3 else 1
    block_dim = next_power_of_2(dim)
    block_rows = max(1, _BLOCK // block_dim)
    programs = cdiv(tokens * groups, block_rows)
    launch(
        _gated_norm_kernel,
        (programs,),
        y,
        z,
        weight,
        out,
        y.stride(0),
        y.stride(1) if y.dim() == 3 else dim,
        z.stride(0),
        z.stride(1) if z.dim() == 3 else 0,
        tokens * groups,
        eps,
        GROUPS=groups,
        SIDE_BY_SIDE=groups // parts,
        DIM=dim,
        WEIGHTS=1 if weight is None else weight.shape[0] // dim,
        ORDER=order,
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        ARE_FEW=programs <= _FEW,
        num_warps=min(max(block_rows * block_dim // 512, 1), 16),
        **overlap_options(y.device, _gated_norm_kernel),
    )
