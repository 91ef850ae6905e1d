"""Weights as codes of 4 or 8 bits with scales, which products read as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.parallel import Span
from paceline.kernels.act_and_mul import act_and_mul
from paceline.kernels.linear import linear
from paceline.kernels.packed_linear import fits_packed, packed_linear
from paceline.kernels.packed_weight import CHUNK, PackedWeight, Packing, encode
from paceline.kernels.scaled_linear import fits_scaled, scaled_linear
from paceline.kernels.skinny_linear import arrival_counters
from paceline.kernels.skinny_scaled_linear import fits_skinny_scaled, skinny_scaled_linear
from paceline.kernels.unpack_weight import unpack_weight
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import LinearFormat, Named, by_part, without_bias


class PackedMatrix(NamedTuple):
    """Projections as blocks of rows."""

    words: nn.Parameter  # [sum of parts, num_words]  int32  see `PackedWeight`
    scale: nn.Parameter  # [sum of parts, num_groups]  of the packing's scale_dtype
    zero: nn.Parameter | None  # [sum of parts, num_groups]  uint8
    bias: nn.Parameter | None  # [sum of parts]  of the model's dtype
    counters: Tensor  # [tiles]  int32  see `packed_linear`
    parts: tuple[Span, ...]  # rows of each
    columns: Span
    has_bias: bool  # the layer's; a rank behind the first may hold none of it
    has_whole_blocks: bool  # parts begin and end where rows that share scales do

    @property
    def packed(self) -> PackedWeight:
        return PackedWeight(self.words, self.scale, self.zero)


@dataclass(frozen=True, slots=True)
class PackedLinear(LinearFormat[PackedMatrix]):
    """A checkpoint that is seen as one of packed weights has `words`, `scale` and `zero` of each
    projection."""

    packing: Packing

    def __str__(self) -> str:
        return str(self.packing)

    def takes(self, columns: Span) -> bool:
        """Whether a rank's columns begin and end where words and groups do."""
        return takes_columns(self.packing, columns)

    def allocate(
        self, parts: Sequence[Span], columns: Span, *, bias: bool, placement: Placement
    ) -> PackedMatrix:
        rows = sum(part.size for part in parts)
        adds = bias and columns.first == 0
        return PackedMatrix(
            *empty_packed(rows, columns.size, self.packing, placement.device),
            bias=empty_parameter(rows, placement=placement) if adds else None,
            counters=arrival_counters(rows, device=placement.device),
            parts=tuple(parts),
            columns=columns,
            has_bias=bias,
            has_whole_blocks=not any(
                cut % self.packing.shared_rows for part in parts for cut in (part.first, part.size)
            ),
        )

    def fill(self, weight: PackedMatrix, names: Sequence[str]) -> Named:
        words, groups = column_spans(self.packing, weight.columns)
        named = by_part(names, "words", weight.words, weight.parts, (words,))
        named |= by_part(names, "scale", weight.scale, weight.parts, (groups,))
        if weight.zero is not None:
            named |= by_part(names, "zero", weight.zero, weight.parts, (groups,))
        if weight.bias is not None:
            return named | by_part(names, "bias", weight.bias, weight.parts, ())
        if weight.has_bias:
            named |= without_bias(names, weight.parts, torch.float32)
        return named

    def scales(self, weight: PackedMatrix) -> tuple[Tensor, ...]:
        return (weight.scale,)

    def set_noise(
        self, weight: PackedMatrix, normal: Callable[[tuple[int, ...]], Tensor]
    ) -> tuple[Tensor, ...]:
        noise = normal((weight.words.shape[0], weight.columns.size))
        packed = encode(noise, self.packing)
        weight.words.copy_(packed.words)
        weight.scale.copy_(packed.scale)
        return weight.words, weight.scale

    def apply(self, x: Tensor, weight: PackedMatrix) -> Tensor:
        return self._product(x, weight, None)

    def apply_gated(self, x: Tensor, weight: PackedMatrix, activation: str) -> Tensor:
        return self._product(x, weight, activation)

    def _product(self, x: Tensor, weight: PackedMatrix, activation: str | None) -> Tensor:
        if weight.has_whole_blocks and fits_scaled(x, weight.packed, self.packing):
            product = scaled_linear(x, weight.packed, weight.bias, self.packing)
        elif fits_packed(x, self.packing):
            is_rounded = fits_skinny_scaled(x, self.packing)
            return (skinny_scaled_linear if is_rounded else packed_linear)(
                x,
                weight.packed,
                weight.bias,
                self.packing,
                activation=activation,
                counters=weight.counters,
            )
        else:
            numbers = unpack_weight(weight.packed, self.packing, x.shape[1], x.dtype)
            product = linear(x, numbers, weight.bias)
        return product if activation is None else act_and_mul(product, activation)


def empty_packed(
    rows: int, columns: int, packing: Packing, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter | None]:
    """Uninitialised parameters of a `PackedWeight`; scales are NaN, which shows what nobody
    writes."""

    def empty(count: int, dtype: torch.dtype) -> nn.Parameter:
        data = torch.empty(rows, count, dtype=dtype, device=device)
        return nn.Parameter(data, requires_grad=False)

    groups = packing.num_groups(columns)
    scale = empty(groups, packing.scale_dtype)
    scale.fill_(torch.nan)
    zero = empty(groups, torch.uint8) if packing.has_zeros else None
    return empty(packing.num_words(columns), torch.int32), scale, zero


def takes_columns(packing: Packing, columns: Span) -> bool:
    """Whether a rank's columns begin and end where words and groups do."""
    if columns.size == columns.total:
        return True
    group = packing.group or 1
    return not any(cut % CHUNK or cut % group for cut in (columns.first, columns.size))


def column_spans(packing: Packing, columns: Span) -> tuple[Span, Span]:
    """A rank's columns, counted in words and in groups."""
    words = _counted(columns, packing.num_words, CHUNK)
    if packing.group is None:
        return words, Span(0, 1, 1)
    return words, _counted(columns, packing.num_groups, packing.group)


def _counted(columns: Span, count: Callable[[int], int], unit: int) -> Span:
    """`columns` counted otherwise: in words, or in groups.  unit: columns that do not share one."""
    if columns.size == columns.total:
        total = count(columns.total)
        return Span(0, total, total)
    per_unit = count(unit)
    return Span(
        columns.first // unit * per_unit,
        columns.size // unit * per_unit,
        count(columns.total),
    )
