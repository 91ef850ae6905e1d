"""Experts as codes of 4 or 8 bits with scales, which products read as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from torch import Tensor, nn

from paceline.core.parallel import Span, rank_of, whole
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
from paceline.layers.weights.weight_format import (
    ExpertNames,
    ExpertsFormat,
    Named,
    of_another_rank,
    partly,
    share_of_columns,
)


class PackedStack(NamedTuple):
    """The projections of the experts held; gate and up rows interleaved, see `ExpertWeights`."""

    gate_up_words: nn.Parameter  # [experts * 2 * inter, num_words]  int32
    gate_up_scale: nn.Parameter  # [experts * 2 * inter, num_groups]  of the packing's scale_dtype
    gate_up_zero: nn.Parameter | None  # [experts * 2 * inter, num_groups]  uint8
    down_words: nn.Parameter  # [experts * hidden, num_words]  int32
    down_scale: nn.Parameter  # [experts * hidden, num_groups]  of the packing's scale_dtype
    down_zero: nn.Parameter | None  # [experts * hidden, num_groups]  uint8
    experts: Span
    hidden: int
    inter: Span  # columns of each

    @property
    def gate_up(self) -> PackedWeight:
        return PackedWeight(self.gate_up_words, self.gate_up_scale, self.gate_up_zero)

    @property
    def down(self) -> PackedWeight:
        return PackedWeight(self.down_words, self.down_scale, self.down_zero)


@dataclass(frozen=True, slots=True)
class PackedExperts(ExpertsFormat[PackedStack]):
    """A checkpoint that is seen as one of packed weights has `words`, `scale` and `zero` of each
    expert's projections.

    Ranks hold their part of every expert's columns.  Where that would begin or end within a chunk
    of words or a group of a down projection, each holds some experts whole, and multiplies the
    pairs with these alone."""

    gate_up: Packing
    down: Packing

    def __str__(self) -> str:
        kinds = dict.fromkeys((str(self.gate_up), str(self.down)))
        return " and ".join(kinds)

    def takes(self, count: int, inter: Span) -> bool:
        """Whether every rank has columns, or an expert, to hold."""
        return takes_columns(self.down, inter) or count >= rank_of(inter).size

    def allocate(
        self, count: int, hidden: int, inter: Span, *, bias: bool, placement: Placement
    ) -> PackedStack:
        assert not bias, "no checkpoint has biases and codes of each expert"
        device = placement.device
        experts = whole(count)
        if not takes_columns(self.down, inter):
            experts, inter = rank_of(inter).spread(count), whole(inter.total)
        gate_up = empty_packed(experts.size * 2 * inter.size, hidden, self.gate_up, device)
        down = empty_packed(experts.size * hidden, inter.size, self.down, device)
        return PackedStack(*gate_up, *down, experts, hidden, inter)

    def fill(self, weight: PackedStack, names: Sequence[str]) -> NoReturn:
        raise AssertionError("codes of all experts in one tensor")

    def fill_each(self, weight: PackedStack, names: Sequence[ExpertNames]) -> Named:
        words, groups = column_spans(self.gate_up, whole(weight.hidden))
        down_words, down_groups = column_spans(self.down, weight.inter)
        inter, hidden, experts = weight.inter, whole(weight.hidden), weight.experts
        ours = names[experts.first : experts.end]
        named: Named = {}
        for field, held, behind in (
            ("words", weight.gate_up_words, words),
            ("scale", weight.gate_up_scale, groups),
            ("zero", weight.gate_up_zero, groups),
        ):
            if held is not None:
                for name, rows in zip(ours, held.chunk(experts.size), strict=True):
                    named[f"{name.gate}.{field}"] = partly(rows[::2], inter, behind)
                    named[f"{name.up}.{field}"] = partly(rows[1::2], inter, behind)
        for field, held, behind in (
            ("words", weight.down_words, down_words),
            ("scale", weight.down_scale, down_groups),
            ("zero", weight.down_zero, down_groups),
        ):
            if held is not None:
                for name, rows in zip(ours, held.chunk(experts.size), strict=True):
                    named[f"{name.down}.{field}"] = partly(rows, hidden, behind)
        return named | _of_others(named, ours[0], (*names[: experts.first], *names[experts.end :]))

    def share(self, weight: PackedStack) -> str:
        experts, inter = weight.experts, weight.inter
        if experts.size == experts.total:
            return share_of_columns(experts.total, inter)
        return (
            f"{experts.size} of {experts.total} experts, whole: a part of their {inter.total} "
            f"columns would begin or end within a chunk of words or a group ({self.down})"
        )

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
            return packed_experts(x, routing, matrices, gate, plus, weight.experts)
        by_expert = (weight.experts.size, -1)
        gate_up, down = (unpack_weight(*each, x.dtype).unflatten(0, by_expert) for each in matrices)
        numbers = ExpertWeights(gate_up, None, down, None)
        return moe_experts(x, routing, numbers, gate, plus, weight.experts)

    def _matrices(self, weight: PackedStack) -> PackedExpertWeights:
        return PackedExpertWeights(
            PackedMatrices(weight.gate_up, self.gate_up, weight.hidden),
            PackedMatrices(weight.down, self.down, weight.inter.size),
        )


def _of_others(named: Named, ours: ExpertNames, others: Sequence[ExpertNames]) -> Named:
    """The tensors of experts that other ranks hold, which are stored as those of `ours`."""
    renamed = [(mine, theirs) for other in others for mine, theirs in zip(ours, other, strict=True)]
    return {
        f"{theirs}.{field}": of_another_rank(named[f"{mine}.{field}"])
        for mine, theirs in renamed
        for field in PackedWeight._fields
        if f"{mine}.{field}" in named
    }
