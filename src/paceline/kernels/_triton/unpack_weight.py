"""Triton kernel of unpack_weight; see kernels/unpack_weight.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch
from paceline.kernels._triton.packed_codes import chunk_numbers, group_of_word
from paceline.kernels._triton.runtime import cdiv, interpreted, require_runnable
from paceline.kernels.packed_weight import CHUNK, PackedWeight, words_of

_CHUNK = tl.constexpr(CHUNK)
_ROWS = 64


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
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if GROUP == 0 else _CHUNK // GROUP  # of a chunk
    chunk = tl.program_id(0)
    local = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = local < rows
    row = local.to(tl.int64)
    word = tl.arange(0, WORDS // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    num_words = tl.cdiv(columns, _CHUNK) * WORDS
    word_ptrs = words_ptr + (row * num_words + chunk * WORDS)[:, None, None] + word[None, :, :]
    words = tl.load(word_ptrs, mask=live[:, None, None], other=0)
    first = chunk * PARTS if GROUP > 0 else 0
    left = tl.where(live, groups - first, 0)
    places = row * groups + first
    zero = tl.full((1, 1, 1), 8 if KIND == "int4" else 128, tl.int32)
    if zero_ptr is not None:
        group = group_of_word(GROUP, WORDS)[None, :, :]
        held = group < left[:, None, None]
        zero = tl.load(zero_ptr + places[:, None, None] + group, mask=held, other=0).to(tl.int32)
    DTYPE: tl.constexpr = tl.float16 if out_ptr.dtype.element_ty == tl.float16 else tl.bfloat16
    numbers = chunk_numbers(words, zero, ROWS, KIND, DTYPE, INTERPRETED).to(tl.float32)
    part = tl.arange(0, PARTS)[None, :]
    scale = tl.load(scale_ptr + places[:, None] + part, mask=part < left[:, None], other=0.0)
    scaled = tl.reshape(numbers, (ROWS, PARTS, _CHUNK // PARTS)) * scale.to(tl.float32)[:, :, None]
    column = chunk * _CHUNK + tl.arange(0, _CHUNK)
    tl.store(
        out_ptr + row[:, None] * columns + column[None, :],
        tl.reshape(scaled, (ROWS, _CHUNK)).to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (column < columns)[None, :],
    )


def launch_unpack_weight(weight: PackedWeight, *, kind: str, group: int, out: Tensor) -> None:
    """One kernel; arguments as checked by kernels/unpack_weight.py."""
    require_runnable(
        "weight of unpack_weight", out, _unpack_weight_kernel, otherwise="use the CPU's kernel"
    )
    rows, columns = out.shape
    launch(
        _unpack_weight_kernel,
        (cdiv(columns, CHUNK), cdiv(rows, _ROWS)),
        *weight,
        out,
        rows,
        columns,
        weight.scale.shape[1],
        KIND=kind,
        GROUP=0 if group >= columns else group,
        WORDS=words_of(kind),
        ROWS=_ROWS,
        INTERPRETED=interpreted(_unpack_weight_kernel),
        num_warps=4,
    )
