"""Triton kernel of keep_states; see kernels/keep_states.py for the definition."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.model.cache_groups import CHECKPOINT, WRITE
from paceline.core.padding import PAD_PAGE
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, widest_integers

_BLOCK = 1024  # numbers of a slot that one program copies at a time
_PROGRAMS = 4096  # they take 2 us where nothing is copied
_WRITE, _CHECKPOINT, _PAD = tl.constexpr(WRITE), tl.constexpr(CHECKPOINT), tl.constexpr(PAD_PAGE)


@triton.jit
def _keep_states_kernel(
    part_ptr,  # [layers, num_slots, width] of any integers
    lens_ptr,  # [num_slots] int32
    prefix_lens_ptr,  # [padded_reqs] int32
    slots_ptr,  # [padded_reqs, 3] int32  read, write, checkpoint
    num_kept_ptr,  # [padded_reqs] int32, of a round a column of its results
    state_lens_ptr,  # [padded_reqs] int32
    stride_slots,
    stride_num_kept,
    num_slots,
    width,
    every,
    TELLS: tl.constexpr,  # lengths too: one launch of a step does
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req, layer, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    written = tl.load(slots_ptr + req * stride_slots + _WRITE).to(tl.int64)
    checkpoint = tl.load(slots_ptr + req * stride_slots + _CHECKPOINT).to(tl.int64)
    num_kept = tl.load(num_kept_ptr + req * stride_num_kept)
    committed = tl.load(prefix_lens_ptr + req) + num_kept
    is_kept = (committed % every == 0) & (num_kept > 0) & (checkpoint != _PAD)
    if is_kept:
        layer_ptr = part_ptr + layer * num_slots * width
        for begin in range(chunk * BLOCK, width, tl.num_programs(2) * BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            state = tl.load(layer_ptr + written * width + columns, mask=columns < width)
            tl.store(layer_ptr + checkpoint * width + columns, state, mask=columns < width)
    if TELLS:
        tells = (layer == 0) & (chunk == 0)
        tl.store(state_lens_ptr + req, tl.where(is_kept, committed, 0), mask=tells)
        tl.store(lens_ptr + written, committed, mask=tells & (written != _PAD))
        tl.store(lens_ptr + checkpoint, committed, mask=tells & is_kept)
        tl.store(lens_ptr + _PAD, 0, mask=tells)


def launch_keep_states(
    parts: Sequence[Tensor],
    lens: Tensor,
    prefix_lens: Tensor,
    slots: Tensor,
    num_kept: Tensor,
    every: int,
    state_lens: Tensor,
) -> None:
    """One launch per part: of each request and layer as many programs as fill a GPU, each for some
    blocks of a slot.  Most steps copy nothing, and then programs are all that they cost."""
    reqs = slots.shape[0]
    for index, part in enumerate(map(widest_integers, parts)):
        layers, num_slots, width = part.shape
        launch(
            _keep_states_kernel,
            (reqs, layers, max(1, min(_PROGRAMS // (reqs * layers), cdiv(width, _BLOCK)))),
            part,
            lens,
            prefix_lens,
            slots,
            num_kept,
            state_lens,
            slots.stride(0),
            num_kept.stride(0),
            num_slots,
            width,
            every,
            TELLS=index == 0,
            BLOCK=_BLOCK,
            num_warps=4,
            **overlap_options(lens.device, _keep_states_kernel),
        )
