"""Triton kernel of all_reduce_add_rms_norm; see kernels/all_reduce_norm.py for the definition.

A channel of `_triton.all_reduce`, in whose words and places it counts on: a slice is a row, and who
has all parts of it norms it.  What does not depend on the peers is loaded while they send.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.all_reduce import channel_constants, ordered_sum, send, wait
from paceline.kernels._triton.launch import launch, overlap_options, wait_for_inputs
from paceline.kernels._triton.rms_norm import weighed
from paceline.kernels._triton.runtime import next_power_of_2
from paceline.kernels.all_reduce import CHANNELS


@triton.jit
def _all_reduce_norm_kernel(
    x_ptr,  # [rows, DIM]
    residual_ptr,  # [rows, DIM]
    weight_ptr,  # [DIM]
    out_ptr,  # [rows, DIM]
    box_ptr,  # this rank's, [2, RANKS, CHANNELS, SLICE]; written by its peers
    sent_ptr,  # [CHANNELS, RANKS] int64
    peers_ptr,  # [RANKS, 2] int64 addresses
    stride_residual,
    rows,
    eps,
    DIM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT_NS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    channel = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    live = columns < DIM
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAPPED)
    own_ptr = sent_ptr + channel * RANKS + RANK
    turn = tl.load(own_ptr)
    for row in range(channel, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64)
        own = tl.load(x_ptr + at * DIM + columns, mask=live, other=0.0)
        send(own, live, turn, channel, peers_ptr, x_ptr, RANK, RANKS, SLICE, BLOCK)
        residual_ptrs = residual_ptr + at * stride_residual + columns
        residual = tl.load(residual_ptrs, mask=live, other=0.0)
        wait(sent_ptr, turn, channel, RANK, RANKS, WAIT_NS, INTERPRETED)
        total = ordered_sum(own, live, turn, channel, peers_ptr, x_ptr, RANK, RANKS, SLICE, BLOCK)
        added = (total.to(DTYPE).to(tl.float32) + residual.to(tl.float32)).to(DTYPE)
        tl.store(residual_ptrs, added, mask=live)
        wide_row = added.to(tl.float32)
        mean_square = tl.sum(wide_row * wide_row, axis=0) / DIM
        normed = wide_row * (1.0 / tl.sqrt(mean_square + eps))
        result = weighed(normed, weight, DTYPE, UNIT_OFFSET, WIDE)
        tl.store(out_ptr + at * DIM + columns, result.to(DTYPE), mask=live)
        turn += 1
    tl.store(own_ptr, turn)


def launch_all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool,
    wide: bool,
    rank: int,
    box: Tensor,
    sent: Tensor,
    peers: Tensor,
    out: Tensor,
) -> None:
    """A program for each row, or for each channel; arguments as checked by
    kernels/all_reduce_norm.py."""
    rows, dim = x.shape
    if rows == 0:
        return
    block = next_power_of_2(dim)
    launch(
        _all_reduce_norm_kernel,
        (min(rows, CHANNELS),),
        x.contiguous(),
        residual,
        weight,
        out,
        box,
        sent,
        peers,
        residual.stride(0),
        rows,
        eps,
        DIM=dim,
        UNIT_OFFSET=unit_offset,
        WIDE=wide,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **channel_constants(x, rank, box.shape[1]),
        **overlap_options(x.device, _all_reduce_norm_kernel),
    )
