"""Triton kernel of keep_states; see kernels/keep_states.py for the definition."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.model.cache_groups import CHECKPOINT, WRITE
from paceline.core.padding import PAD_PAGE
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2, widest_integers

_BLOCK = 1024  # numbers of a slot that one program copies at a time
_PROGRAMS = 1024  # they take 1.5 us where nothing is copied
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
    padded_reqs,
    num_slots,
    width,
    every,
    TELLS: tl.constexpr,  # lengths too: one launch of a step does
    BLOCK: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    chunk, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    req = tl.arange(0, BLOCK_REQS)
    live = req < padded_reqs
    slot_ptrs = slots_ptr + req * stride_slots
    written = tl.load(slot_ptrs + _WRITE, mask=live, other=_PAD).to(tl.int64)
    checkpoint = tl.load(slot_ptrs + _CHECKPOINT, mask=live, other=_PAD).to(tl.int64)
    num_kept = tl.load(num_kept_ptr + req * stride_num_kept, mask=live, other=0)
    committed = tl.load(prefix_lens_ptr + req, mask=live, other=0) + num_kept
    is_kept = (committed % every == 0) & (num_kept > 0) & (checkpoint != _PAD)
    layer_ptr = part_ptr + layer * num_slots * width
    kept_before = tl.cumsum(is_kept.to(tl.int32)) - 1
    for index in range(tl.sum(is_kept.to(tl.int32))):
        is_its = is_kept & (kept_before == index)
        source_ptr = layer_ptr + tl.sum(tl.where(is_its, written, 0)) * width
        target_ptr = layer_ptr + tl.sum(tl.where(is_its, checkpoint, 0)) * width
        for begin in range(chunk * BLOCK, width, tl.num_programs(0) * BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            state = tl.load(source_ptr + columns, mask=columns < width)
            tl.store(target_ptr + columns, state, mask=columns < width)
    if TELLS and chunk + layer == 0:
        tl.store(state_lens_ptr + req, tl.where(is_kept, committed, 0), mask=live)
        tl.store(lens_ptr + written, committed, mask=written != _PAD)
        tl.store(lens_ptr + checkpoint, committed, mask=is_kept)
        tl.store(lens_ptr + _PAD, 0)


def launch_keep_states(
    parts: Sequence[Tensor],
    lens: Tensor,
    prefix_lens: Tensor,
    slots: Tensor,
    num_kept: Tensor,
    every: int,
    state_lens: Tensor,
) -> None:
    """One launch per part: as many programs as fill a GPU, each for some blocks of one layer of all
    slots that are kept.  Most steps copy nothing, and then programs are all that they cost."""
    reqs = slots.shape[0]
    for index, part in enumerate(map(widest_integers, parts)):
        layers, num_slots, width = part.shape
        launch(
            _keep_states_kernel,
            (max(1, min(_PROGRAMS // layers, cdiv(width, _BLOCK))), layers),
            part,
            lens,
            prefix_lens,
            slots,
            num_kept,
            state_lens,
            slots.stride(0),
            num_kept.stride(0),
            reqs,
            num_slots,
            width,
            every,
            TELLS=index == 0,
            BLOCK=_BLOCK,
            BLOCK_REQS=next_power_of_2(reqs),
            num_warps=4,
            **overlap_options(lens.device, _keep_states_kernel),
        )
