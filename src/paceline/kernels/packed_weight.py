"""Packed weights: codes of 4 or 8 bits in words of 32, with a scale for each group of columns.

    W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g],  g = k // group

Codes are unsigned integers, or e4m3 numbers, which have no zero.  Every checkpoint's codes are
brought into one order, that of the matrix unit's left operand (PTX ISA, wgmma fragments of A): 16
bytes that lie together are what one thread multiplies of one row of a CHUNK, in pairs of columns
of which a word has one number in either half.  With q = 16 / bits pairs in a word, a chunk's
words are 16 h + 4 t + i and

    column 8 q (4 h + i) + 8 j + 2 t + p  =  field j + q p of word 16 h + 4 t + i,
    0 <= h < bits / 4,  0 <= i, t < 4,  0 <= j < q,  0 <= p < 2

Example of 4 bits: the first word holds columns 0, 8, 16, 24 and 1, 9, 17, 25 of its chunk, the
lowest bits first.  The last chunk is filled up with codes that nothing multiplies.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 128  # columns
INT4, INT8, FP8 = "int4", "int8", "fp8"
_BITS = {INT4: 4, INT8: 8, FP8: 8}
_GROUPS = (32, 64, 128)
_MOST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def words_of(kind: str) -> int:
    """In which a chunk's codes lie."""
    return CHUNK * _BITS[kind] // 32


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of a weight are stored."""

    kind: str  # INT4, INT8 or FP8
    group: int | None  # columns that share a scale; None: all
    has_zeros: bool  # of integers; without, zero is half of what codes can be
    scale_dtype: torch.dtype
    shared_rows: int = 1  # that have the same scales, from a multiple of as many on: 128 of blocks
    rounds_inputs: bool = False  # products of many rows round these to codes, too: fp8 with scales
    # of rows or of blocks of 128 x 128

    def __post_init__(self) -> None:
        assert self.group is None or self.group in _GROUPS, self
        assert self.kind != FP8 or not self.has_zeros, self
        assert self.shared_rows == 1 or (self.shared_rows, self.group) == (CHUNK, CHUNK), self
        assert not self.rounds_inputs or self.can_round_inputs, self

    @property
    def can_round_inputs(self) -> bool:
        """Whether there are products of such codes with rows that are rounded."""
        return self.kind == FP8 and (self.group is None or self.shared_rows == CHUNK)

    @property
    def bits(self) -> int:
        return _BITS[self.kind]

    @property
    def words(self) -> int:
        """Of a chunk."""
        return words_of(self.kind)

    def num_words(self, columns: int) -> int:
        """Of one row."""
        return -(-columns // CHUNK) * self.words

    def num_groups(self, columns: int) -> int:
        """Of one row; the last may be partial."""
        return 1 if self.group is None else -(-columns // self.group)

    def __str__(self) -> str:
        group = "a row" if self.group is None else f"{self.group} columns"
        if self.shared_rows > 1:
            group += f" of {self.shared_rows} rows"
        return f"{self.kind}, a scale for {group}"


def packable(group: int, columns: int) -> bool:
    """Whether weights with groups of this many columns have a Packing."""
    return group >= columns or group in _GROUPS


class PackedWeight(NamedTuple):
    """[rows, columns] numbers."""

    words: Tensor  # [rows, num_words]  int32
    scale: Tensor  # [rows, num_groups]  of the packing's scale_dtype
    zero: Tensor | None  # [rows, num_groups]  uint8


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes [rows, columns] uint8 -> words [rows, num_words] int32, on the same device."""
    rows, columns = codes.shape
    halves, pairs = bits // 4, 16 // bits
    padded = torch.nn.functional.pad(codes, (0, -columns % CHUNK))
    parts = padded.view(rows, -1, halves, 4, pairs, 4, 2).to(torch.int32)  # h, i, j, t, p
    words = torch.zeros(rows, parts.shape[1], halves, 4, 4, dtype=torch.int32, device=codes.device)
    for j in range(pairs):
        for p in range(2):
            words |= parts[:, :, :, :, j, :, p].transpose(3, 4) << bits * (j + pairs * p)
    return words.flatten(1)


def unpack_codes(words: Tensor, bits: int, columns: int) -> Tensor:
    """As they were packed: [rows, columns] uint8."""
    halves, pairs = bits // 4, 16 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    # The sign bit is a code's: what an arithmetic shift brings in is masked away.
    fields = (words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    by_field = fields.view(words.shape[0], -1, halves, 4, 4, 2, pairs)  # h, t, i, p, j
    codes = by_field.permute(0, 1, 2, 4, 6, 3, 5)
    return codes.flatten(1)[:, :columns].to(torch.uint8)


def unpack_reference(weight: PackedWeight, packing: Packing, columns: int) -> Tensor:
    """The definition: [rows, columns] float32."""
    codes = unpack_codes(weight.words, packing.bits, columns)
    if packing.kind == FP8:
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif weight.zero is None:
        numbers = codes.float() - (1 << packing.bits - 1)
    else:
        numbers = codes.float() - _by_column(weight.zero.float(), packing, columns)
    return numbers * _by_column(weight.scale.float(), packing, columns)


def _by_column(table: Tensor, packing: Packing, columns: int) -> Tensor:
    if packing.group is None:
        return table
    return table.repeat_interleave(packing.group, dim=1)[:, :columns]


def encode(numbers: Tensor, packing: Packing) -> PackedWeight:
    """The nearest that a packing without zeros has.  numbers: [rows, columns] on any device."""
    assert not packing.has_zeros, packing
    rows, columns = numbers.shape
    group = packing.group or columns
    most = _MOST_FP8 if packing.kind == FP8 else (1 << packing.bits - 1) - 1
    padded = torch.nn.functional.pad(numbers.float(), (0, -columns % group)).view(rows, -1, group)
    largest = padded.abs().amax(2)
    if packing.shared_rows > 1:
        by_block = torch.nn.functional.pad(largest, (0, 0, 0, -rows % packing.shared_rows))
        of_blocks = by_block.unflatten(0, (-1, packing.shared_rows)).amax(1)
        largest = of_blocks.repeat_interleave(packing.shared_rows, dim=0)[:rows]
    scale = (largest / most).clamp_(min=torch.finfo(torch.float16).tiny)
    scale = scale.to(packing.scale_dtype)
    quotients = (padded / scale.float().unsqueeze(2)).flatten(1)[:, :columns]
    if packing.kind == FP8:
        codes = quotients.clamp_(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        half = 1 << packing.bits - 1
        codes = (quotients.round_().clamp_(-half, half - 1) + half).to(torch.uint8)
    return PackedWeight(pack_codes(codes, packing.bits), scale, None)
