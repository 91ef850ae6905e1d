"""Poison: values that must be without effect, written over bytes that a step may not read.

Floats become NaN; in slots that kernels multiply by 0, finite numbers that show.  Integers stay
small and become another number than the right one: an index of poison is in bounds, so that reading
it gives a wrong answer and not a crash that names nothing.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

LARGE = 200.0  # finite in every format; the largest float8_e4m3fn is 448
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width: equal when equal bit by bit."""
    return tensor.view(_BITS[tensor.element_size()])


def float_bits(number: float, like: Tensor) -> Tensor:
    """[]  `number` in the format of `like`, as bits; nobody writes to it."""
    return _bits_in(number, like.dtype, like.device)


@cache
def _bits_in(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    value = torch.full((), number, dtype=torch.float32, device=device)
    return bits_of(value.to(dtype))


def poison_bits(tensor: Tensor) -> Tensor:
    """Poison for every element, as bits that broadcast to `tensor`; floats become NaN."""
    if tensor.is_floating_point():
        return float_bits(math.nan, tensor)
    bits = bits_of(tensor)
    if tensor.dtype is torch.bool:
        return 1 - bits
    if tensor.element_size() == 1:
        return bits.bitwise_not()  # packed masks, bytes of a workspace
    return 1 + (bits == 1).to(bits.dtype)


def same_numbers(expected: Tensor, now: Tensor, tolerance: float) -> bool:
    """Whether all bits agree; else, with a tolerance, whether all floats are as close as that,
    relative to the largest."""
    if torch.equal(bits_of(expected), bits_of(now)):
        return True
    if not tolerance or not expected.is_floating_point():
        return False
    wide, narrow = expected.float(), now.float()
    return bool(((wide - narrow).abs() <= tolerance * wide.abs().max()).all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Poisoned:
    """Elements of one tensor and the poison they get."""

    tensor: Tensor  # [n, ...]  the live memory, any dtype
    index: Tensor | None  # [m]  int64  which of its n rows; None: all
    dead: Tensor | None  # bool, broadcasts to tensor[index]; None: all
    poison: Tensor  # bits, broadcast to tensor[index]

    def write(self) -> None:
        """Poison the dead elements."""
        bits = bits_of(self.tensor)
        values = bits if self.index is None else bits[self.index]
        poison = self.poison.expand_as(values)
        if self.dead is not None:
            poison = torch.where(self.dead, poison, values)
        if self.index is None:
            bits.copy_(poison)
        else:
            bits[self.index] = poison

    def is_intact(self) -> bool:
        """Whether every dead element still holds its poison."""
        bits = bits_of(self.tensor)
        values = bits if self.index is None else bits[self.index]
        same = values == self.poison
        if self.dead is not None:
            same = same | ~self.dead
        return bool(same.all())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """Bytes of one buffer that a step may not read, for one reason."""

    name: str  # buffer and field
    pieces: tuple[Poisoned, ...]
    remedy: str
    is_foreign: bool = False  # a step may not write them either
    is_padding: bool = False  # padded rows read them: their output may change, not that of others

    def write(self) -> None:
        for piece in self.pieces:
            piece.write()

    def is_intact(self) -> bool:
        return all(piece.is_intact() for piece in self.pieces)
