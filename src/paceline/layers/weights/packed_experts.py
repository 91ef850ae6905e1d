"""Experts as codes of 4 or 8 bits with scales, which products read as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from torch import Tensor, nn

from paceline.core.parallel import Span, whole
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU, moe_experts
from paceline.kernels.moe_route import Routing
from paceline.kernels.packed_experts import (
    PackedExpertWeights,
    PackedMatrices,
    fits_packed_experts,
    packed_experts,
)
from paceline.kernels.packed_weight import PackedWeight, Packing, encode
from paceline.kernels.unpack_weight import unpack_weight
from paceline.layers.weights.packed import column_spans, empty_packed, takes_columns
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import ExpertNames, ExpertsFormat, Named, partly


class PackedStack(NamedTuple):
    """Every expert's projections; gate and up rows interleaved, see `ExpertWeights`."""

    gate_up_words: nn.Parameter  # [experts * 2 * inter, num_words]  int32
    gate_up_scale: nn.Parameter  # [experts * 2 * inter, num_groups]  of the packing's scale_dtype
    gate_up_zero: nn.Parameter | None  # [experts * 2 * inter, num_groups]  uint8
    down_words: nn.Parameter  # [experts * hidden, num_words]  int32
    down_scale: nn.Parameter  # [experts * hidden, num_groups]  of the packing's scale_dtype
    down_zero: nn.Parameter | None  # [experts * hidden, num_groups]  uint8
    num_experts: int
    hidden: int
    inter: Span

    @property
    def gate_up(self) -> PackedWeight:
        return PackedWeight(self.gate_up_words, self.gate_up_scale, self.gate_up_zero)

    @property
    def down(self) -> PackedWeight:
        return PackedWeight(self.down_words, self.down_scale, self.down_zero)


@dataclass(frozen=True, slots=True)
class PackedExperts(ExpertsFormat[PackedStack]):
    """A checkpoint that is seen as one of packed weights has `words`, `scale` and `zero` of each
    expert's projections."""

    gate_up: Packing
    down: Packing

    def __str__(self) -> str:
        kinds = dict.fromkeys((str(self.gate_up), str(self.down)))
        return " and ".join(kinds)

    def takes(self, inter: Span) -> bool:
        """Whether a rank's columns of a down projection begin and end where words and groups do."""
        return takes_columns(self.down, inter)

    def allocate(
        self, count: int, hidden: int, inter: Span, *, bias: bool, placement: Placement
    ) -> PackedStack:
        assert not bias, "no checkpoint has biases and codes of each expert"
        device = placement.device
        gate_up = empty_packed(count * 2 * inter.size, hidden, self.gate_up, device)
        down = empty_packed(count * hidden, inter.size, self.down, device)
        return PackedStack(*gate_up, *down, count, hidden, inter)

    def fill(self, weight: PackedStack, names: Sequence[str]) -> NoReturn:
        raise AssertionError("codes of all experts in one tensor")

    def fill_each(self, weight: PackedStack, names: Sequence[ExpertNames]) -> Named:
        words, groups = column_spans(self.gate_up, whole(weight.hidden))
        down_words, down_groups = column_spans(self.down, weight.inter)
        inter, hidden = weight.inter, whole(weight.hidden)
        named: Named = {}
        for field, held, behind in (
            ("words", weight.gate_up_words, words),
            ("scale", weight.gate_up_scale, groups),
            ("zero", weight.gate_up_zero, groups),
        ):
            if held is not None:
                for name, rows in zip(names, held.chunk(weight.num_experts), strict=True):
                    named[f"{name.gate}.{field}"] = partly(rows[::2], inter, behind)
                    named[f"{name.up}.{field}"] = partly(rows[1::2], inter, behind)
        for field, held, behind in (
            ("words", weight.down_words, down_words),
            ("scale", weight.down_scale, down_groups),
            ("zero", weight.down_zero, down_groups),
        ):
            if held is not None:
                for name, rows in zip(names, held.chunk(weight.num_experts), strict=True):
                    named[f"{name.down}.{field}"] = partly(rows, hidden, behind)
        return named

    def scales(self, weight: PackedStack) -> tuple[Tensor, ...]:
        return weight.gate_up_scale, weight.down_scale

    def set_noise(
        self, weight: PackedStack, normal: Callable[[tuple[int, ...]], Tensor]
    ) -> tuple[Tensor, ...]:
        for packed, packing, columns in self._matrices(weight):
            made = encode(normal((packed.words.shape[0], columns)), packing)
            packed.words.copy_(made.words)
            packed.scale.copy_(made.scale)
        return (*weight.gate_up[:2], *weight.down[:2])

    def apply(self, x: Tensor, routing: Routing, weight: PackedStack, gate: SwiGLU) -> Tensor:
        return self._experts(x, routing, weight, gate, None)

    def apply_plus(
        self, x: Tensor, routing: Routing, weight: PackedStack, gate: SwiGLU, plus: Tensor
    ) -> Tensor:
        return self._experts(x, routing, weight, gate, plus)

    def _experts(
        self, x: Tensor, routing: Routing, weight: PackedStack, gate: SwiGLU, plus: Tensor | None
    ) -> Tensor:
        matrices = self._matrices(weight)
        if fits_packed_experts(x):
            return packed_experts(x, routing, matrices, gate, plus)
        of_experts = (weight.num_experts, -1)
        gate_up, down = (
            unpack_weight(*each, x.dtype).unflatten(0, of_experts) for each in matrices
        )
        return moe_experts(x, routing, ExpertWeights(gate_up, None, down, None), gate, plus)

    def _matrices(self, weight: PackedStack) -> PackedExpertWeights:
        return PackedExpertWeights(
            PackedMatrices(weight.gate_up, self.gate_up, weight.hidden),
            PackedMatrices(weight.down, self.down, weight.inter.size),
        )
