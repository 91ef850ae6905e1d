"""Triton kernel of unpack_weight; see kernels/unpack_weight.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch
from paceline.kernels._triton.packed_codes import half_numbers
from paceline.kernels._triton.runtime import cdiv, interpreted, require_runnable
from paceline.kernels.packed_weight import CHUNK, PackedWeight

_ROWS = 16
_CHUNKS = 4


@triton.jit
def _unpack_weight_kernel(
    words_ptr,  # [rows, chunks * WORDS] int32
    scale_ptr,  # [rows, groups]
    zero_ptr,  # [rows, groups] uint8, or None
    out_ptr,  # [rows, columns]
    rows,
    columns,
    groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns; 0: all
    WORDS: tl.constexpr,  # of a chunk
    FIELDS: tl.constexpr,  # of a word
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    word = (tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS))[None, :]
    num_words = tl.cdiv(columns, WORDS * FIELDS) * WORDS
    live = (row < rows) & (word < num_words)
    words = tl.load(words_ptr + row * num_words + word, mask=live, other=0)
    first = (word // WORDS) * (WORDS * FIELDS) + word % WORDS  # column of field 0
    HALF: tl.constexpr = 8.0 if KIND == "int4" else 128.0
    DTYPE: tl.constexpr = tl.float16 if out_ptr.dtype.element_ty == tl.float16 else tl.bfloat16
    IN_GROUP: tl.constexpr = FIELDS if GROUP == 0 else GROUP // WORDS  # fields of one group
    for part in tl.static_range(FIELDS // IN_GROUP):
        place = row * groups
        held = live
        if GROUP > 0:
            group = (word // WORDS) * (WORDS * FIELDS // GROUP) + part
            place += group
            held = held & (group < groups)
        scale = tl.load(scale_ptr + place, mask=held, other=0.0).to(tl.float32)
        zero = HALF
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + place, mask=held, other=0).to(tl.float32)
        for step in tl.static_range(IN_GROUP):
            field = part * IN_GROUP + step
            column = first + field * WORDS
            number = half_numbers(words, zero, field, KIND, DTYPE, WIDEN).to(tl.float32) * scale
            tl.store(
                out_ptr + row * columns + column,
                number.to(out_ptr.dtype.element_ty),
                mask=live & (column < columns),
            )


def launch_unpack_weight(weight: PackedWeight, *, kind: str, group: int, out: Tensor) -> None:
    """One kernel; arguments as checked by kernels/unpack_weight.py."""
    require_runnable(
        "weight of unpack_weight", out, _unpack_weight_kernel, otherwise="use the CPU's kernel"
    )
    rows, columns = out.shape
    fields = 8 if kind == "int4" else 4
    words = CHUNK // fields
    launch(
        _unpack_weight_kernel,
        (cdiv(rows, _ROWS), cdiv(cdiv(columns, CHUNK), _CHUNKS)),
        *weight,
        out,
        rows,
        columns,
        weight.scale.shape[1],
        KIND=kind,
        GROUP=0 if group >= columns else group,
        WORDS=words,
        FIELDS=fields,
        BLOCK_ROWS=_ROWS,
        BLOCK_WORDS=_CHUNKS * words,
        WIDEN=out.dtype != torch.float16 and interpreted(_unpack_weight_kernel),
        num_warps=4,
    )
