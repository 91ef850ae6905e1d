"""From codes to numbers, by the definitions of the formats.

Every format comes down to one sentence: W[n, k] = (code - zero) * scale, where scale and zero are
those of the block of rows and columns that (n, k) lies in.  All arithmetic is float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# e2m1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127  # of a byte that is an exponent (the same, section 5.4.1)


class ScaleBlocks(NamedTuple):
    """Which numbers of a matrix share a scale."""

    rows: int  # of one block
    columns: int
    table: tuple[int, int]  # blocks down and across; the last ones may be partial


class Coded(NamedTuple):
    """What the stored tensors of a weight say of it, in one form for all methods."""

    codes: Tensor  # [N, K]  unsigned integers, or e4m3
    scale: Tensor  # as many as blocks.table says
    zero: Tensor | None  # likewise; None: codes are numbers
    blocks: ScaleBlocks

    def numbers(self) -> Tensor:
        """[N, K] float32.  Raises ValueError as `scaled`."""
        return scaled(self.codes, self.scale, self.zero, blocks=self.blocks)


def scaled(
    codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, blocks: ScaleBlocks
) -> Tensor:
    """codes [N, K]; scale, zero: as many as blocks.table says -> [N, K] float32.

    Raises ValueError as `require_factors`, and for a scale that is 0 where codes are not."""
    factors = scale.float().reshape(blocks.table)
    require_factors(factors, signed=zero is not None)
    numbers = codes.float()
    if zero is not None:
        numbers = numbers - _spread(zero.float().reshape(blocks.table), codes.shape, blocks)
    factor = _spread(factors, codes.shape, blocks)
    if bool((factors == 0).any()) and bool(((factor == 0) & (numbers != 0)).any()):
        raise ValueError("a scale of 0 over codes that are not 0")
    return numbers * factor


def require_factors(scale: Tensor, *, signed: bool) -> None:
    """Raise ValueError for a scale that is no finite number, or is negative.

    signed: it may be.  Scales of integers are, where a tool puts the longer side of their range,
    which is below zero, over the larger numbers (AutoRound); codes that are floats have signs."""
    if not bool(scale.isfinite().all()):
        raise ValueError("a scale that is no finite number")
    if not signed and bool((scale < 0).any()):
        raise ValueError("a negative scale")


def _spread(table: Tensor, shape: torch.Size, blocks: ScaleBlocks) -> Tensor:
    """Of each number that of its block, where blocks differ along a dimension."""
    rows, columns = shape
    if table.shape[0] > 1:
        table = table.repeat_interleave(blocks.rows, dim=0)[:rows]
    if table.shape[1] > 1:
        table = table.repeat_interleave(blocks.columns, dim=1)[:, :columns]
    return table


def bit_fields(words: Tensor, bits: int, count: int) -> Tensor:
    """words [rows, W] int32, each row one stream of bits, the lowest first
    -> its first `count` unsigned fields, [rows, count] int32.  bits: a divisor of 32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    # The sign bit is a code's: what an arithmetic shift brings in is masked away.
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.flatten(-2)[..., :count]


def e2m1(packed: Tensor) -> Tensor:
    """packed [..., B] uint8, two codes each, the low half first -> [..., 2 * B] float32."""
    table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
    return table[torch.stack((packed & 15, packed >> 4), dim=-1).long().flatten(-2)]


def e8m0(exponents: Tensor) -> Tensor:
    """Bytes, or float8_e8m0fnu, which are the same -> 2 ** (byte - 127), float32; NaN of 255."""
    exponents = exponents.view(torch.uint8)
    powers = torch.exp2(exponents.float() - _E8M0_BIAS)
    return torch.where(exponents == 255, torch.nan, powers)


def packed_rows(
    words: Tensor,
    scale: Tensor,
    zero_words: Tensor | None = None,
    *,
    bits: int,
    columns: int,
    blocks: ScaleBlocks,
) -> Coded:
    """compressed-tensors' `pack_to_int32`: words [N, W] along K, codes offset by half their range;
    zero_words [ceil(N * bits / 32), G] along N."""
    codes = bit_fields(words, bits, columns)
    if zero_words is None:
        return Coded(
            codes, scale, torch.full(blocks.table, 1 << bits - 1, device=codes.device), blocks
        )
    zero = bit_fields(zero_words.T.contiguous(), bits, codes.shape[0]).T
    return Coded(codes, scale, zero, blocks)


# Column 8 c + j of a matrix is field _AWQ_FIELDS[j] of word c (AutoAWQ's packing_utils.py).
_AWQ_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]


def awq(words: Tensor, zero_words: Tensor, scale: Tensor, *, group: int) -> Coded:
    """words [K, N / 8], zero_words [G, N / 8], scale [G, N]."""
    codes, zero = _awq_fields(words), _awq_fields(zero_words)
    return Coded(codes.T, scale.T, zero.T, ScaleBlocks(1, group, (scale.shape[1], scale.shape[0])))


def _awq_fields(words: Tensor) -> Tensor:
    return bit_fields(words.unsqueeze(-1), 4, 8)[..., _AWQ_FIELDS].flatten(1)


def gptq(
    words: Tensor,
    zero_words: Tensor,
    scale: Tensor,
    order: Tensor | None = None,
    *,
    bits: int,
    group: int,
    is_v2: bool | None,
) -> Coded:
    """words [K * bits / 32, N] along K, zero_words [G, N * bits / 32] along N, scale [G, N], order
    [K]: the group of each column.

    Version 1 stores zero points less 1, in their own field each.  is_v2: None of symmetric weights,
    whose zero points tell it themselves, since files are mislabelled.  Raises ValueError where they
    do not, or where a group is no run of columns (activation order).
    """
    columns, rows = words.shape[0] * 32 // bits, words.shape[1]
    if order is not None and not torch.equal(
        order.long(), torch.arange(columns, device=order.device) // group
    ):
        raise ValueError("columns in activation order (g_idx), which is not served")
    codes = bit_fields(words.T.contiguous(), bits, columns)
    zero, half = bit_fields(zero_words, bits, rows), 1 << bits - 1
    if is_v2 is None:
        is_v2 = bool((zero == half).all())
        if not is_v2 and not bool((zero == half - 1).all()):
            raise ValueError("zero points that are not those of symmetric weights")
    if not is_v2:
        zero = (zero + 1) & ((1 << bits) - 1)
    return Coded(codes, scale.T, zero.T, ScaleBlocks(1, group, (scale.shape[1], scale.shape[0])))


def plain_codes(
    codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, blocks: ScaleBlocks
) -> Coded:
    """codes [N, K] e4m3, or int8, which count from -128."""
    if codes.dtype != torch.int8:
        return Coded(codes, scale, zero, blocks)
    offset = torch.full(blocks.table, 128, device=codes.device)
    if zero is not None:
        offset = offset + zero.reshape(blocks.table)
    return Coded(codes.int() + 128, scale, offset, blocks)


def mxfp4_stack(blocks: Tensor, exponents: Tensor) -> Tensor:
    """gpt-oss's experts: blocks [E, N, B, 16] uint8, exponents [E, N, B] uint8
    -> [E, 32 * B, N] float32, as `transformers` holds them."""
    numbers = e2m1(blocks) * e8m0(exponents).unsqueeze(-1)
    return numbers.flatten(2).transpose(1, 2).contiguous()


def mxfp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """packed [N, K / 2] uint8, exponents [N, K / 32] uint8 -> [N, K] float32."""
    return e2m1(packed) * e8m0(exponents).repeat_interleave(32, dim=1)


def nvfp4(packed: Tensor, scale: Tensor, whole: Tensor, *, divides: bool) -> Tensor:
    """packed [N, K / 2] uint8, scale [N, K / 16] e4m3, whole: one number -> [N, K] float32.

    divides: compressed-tensors stores 448 * 6 / amax, which divides; ModelOpt amax / (448 * 6)."""
    factor = whole.float()
    if not bool((factor.isfinite() & (factor > 0)).all()):
        raise ValueError("a global scale that is no positive number")
    factors = scale.float() / factor if divides else scale.float() * factor
    table = (factors.shape[0], factors.shape[1])
    return scaled(e2m1(packed), factors, blocks=ScaleBlocks(1, 16, table))
