"""Triton kernel of derive_rope; see kernels/derive_rope.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv

_BLOCK = 128  # tokens of one program


@triton.jit
def _derive_rope_kernel(
    given_ptr,  # [rows, max_tokens, AXES] int32
    ahead_ptr,  # [rows, 2] int32
    row_ids_ptr,  # [padded_reqs] int64
    req_ids_ptr,  # [padded_tokens] int64
    positions_ptr,  # [padded_tokens] int64
    rope_positions_ptr,  # [padded_tokens, AXES] int64
    max_tokens,
    num_tokens,
    AXES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < num_tokens
    req = tl.load(req_ids_ptr + tokens, mask=is_token, other=0)
    row = tl.load(row_ids_ptr + req, mask=is_token, other=0)
    positions = tl.load(positions_ptr + tokens, mask=is_token, other=0)
    is_given = is_token & (positions < tl.load(ahead_ptr + row * 2, mask=is_token, other=0))
    behind = positions + tl.load(ahead_ptr + row * 2 + 1, mask=is_token, other=0)
    for axis in tl.static_range(AXES):
        given_ptrs = given_ptr + (row * max_tokens + positions) * AXES + axis
        given = tl.load(given_ptrs, mask=is_given, other=0).to(tl.int64)
        turned = tl.where(is_given, given, behind)
        tl.store(rope_positions_ptr + tokens * AXES + axis, turned, mask=is_token)


def launch_derive_rope(
    given: Tensor,
    ahead: Tensor,
    row_ids: Tensor,
    req_ids: Tensor,
    positions: Tensor,
    rope_positions: Tensor,
) -> None:
    """One program per block of tokens.  rope_positions: [padded_tokens, axes], contiguous."""
    num_tokens, axes = rope_positions.shape
    launch(
        _derive_rope_kernel,
        (cdiv(num_tokens, _BLOCK),),
        given,
        ahead,
        row_ids,
        req_ids,
        positions,
        rope_positions,
        given.shape[1],
        num_tokens,
        AXES=axes,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(positions.device, _derive_rope_kernel),
    )
