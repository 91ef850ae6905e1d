"""Weights as plain numbers of the model's dtype: bfloat16, float16 or float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from paceline.core.parallel import Span, whole
from paceline.kernels.act_and_mul import act_and_mul, activate
from paceline.kernels.head_products import head_products
from paceline.kernels.linear import fits_add_linear, gated_linear, linear, linear_then
from paceline.kernels.linear_parts import fits_parts, linear_parts
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU, moe_experts
from paceline.kernels.moe_route import Routing
from paceline.kernels.reordered_weight import (
    Reordered,
    gains_by_order,
    reorder,
    reordered_linear,
)
from paceline.kernels.skinny_linear import arrival_counters
from paceline.layers.weights.parameter import (
    Placement,
    empty_matrices,
    empty_matrix,
    empty_parameter,
)
from paceline.layers.weights.weight_format import (
    Destination,
    ExpertNames,
    ExpertsFormat,
    LatentFormat,
    LinearFormat,
    Named,
    TableFormat,
    WeightFormats,
    by_part,
    partly,
    share_of_columns,
    wholly,
    without_bias,
)


class DenseMatrix(NamedTuple):
    """Projections as blocks of rows."""

    weight: nn.Parameter  # [sum of parts, columns]
    bias: nn.Parameter | None  # [sum of parts]
    counters: Tensor | None  # [tiles]  int32  see `skinny_linear`; None: no product is split
    parts: tuple[Span, ...]  # rows of each
    columns: Span
    has_bias: bool  # the layer's; a rank behind the first may hold none of it
    reordered: Reordered | None  # what is read for `weight`; None: that is read as it is stored


@dataclass(frozen=True, slots=True)
class DenseLinear(LinearFormat[DenseMatrix]):
    """splits: whether the product of a layer of one part may be split among processors."""

    splits: bool = True

    def allocate(
        self, parts: Sequence[Span], columns: Span, *, bias: bool, placement: Placement
    ) -> DenseMatrix:
        rows = sum(part.size for part in parts)
        is_split = self.splits and len(parts) == 1
        adds = bias and columns.first == 0
        return DenseMatrix(
            weight=empty_matrix(rows, columns.size, placement=placement, has_bias=adds),
            bias=empty_parameter(rows, placement=placement) if adds else None,
            counters=arrival_counters(rows, device=placement.device) if is_split else None,
            parts=tuple(parts),
            columns=columns,
            has_bias=bias,
            reordered=Reordered() if gains_by_order(placement.device, placement.dtype) else None,
        )

    def fill(self, weight: DenseMatrix, names: Sequence[str]) -> Named:
        named = by_part(names, "weight", weight.weight, weight.parts, (weight.columns,))
        if weight.bias is not None:
            named |= by_part(names, "bias", weight.bias, weight.parts, ())
        elif weight.has_bias:
            named |= without_bias(names, weight.parts, weight.weight.dtype)
        return named

    def finish(self, weight: DenseMatrix) -> None:
        if weight.reordered is not None:
            reorder(weight.weight, weight.reordered)

    def apply(self, x: Tensor, weight: DenseMatrix) -> Tensor:
        if weight.reordered is not None and weight.reordered.weight is not None:
            return reordered_linear(x, weight.reordered.weight, weight.bias)
        return linear(x, weight.weight, weight.bias, counters=weight.counters)

    def apply_gated(self, x: Tensor, weight: DenseMatrix, activation: str) -> Tensor:
        if weight.reordered is not None:
            return act_and_mul(self.apply(x, weight), activation)
        return gated_linear(x, weight.weight, weight.bias, activation)

    def apply_then(self, x: Tensor, weight: DenseMatrix, activation: str) -> Tensor:
        if weight.reordered is not None:
            return activate(self.apply(x, weight), activation)
        return linear_then(x, weight.weight, weight.bias, activation)

    def apply_in_parts(self, x: Tensor, weight: DenseMatrix) -> Tensor | None:
        if weight.bias is not None or not fits_parts(x, weight.weight):
            return None
        return linear_parts(x, weight.weight)

    def weight_to_add(self, x: Tensor, weight: DenseMatrix) -> Tensor | None:
        if weight.bias is not None or not fits_add_linear(x):
            return None
        return weight.weight


class DenseRows(NamedTuple):
    weight: Tensor  # [rows, columns]  a parameter, or some of its rows


class DenseTable(TableFormat[DenseRows]):
    def allocate(
        self, rows: int, columns: int, *, placement: Placement, has_head: bool
    ) -> DenseRows:
        empty = empty_matrix if has_head else empty_parameter
        return DenseRows(empty(rows, columns, placement=placement))

    def fill(self, weight: DenseRows, names: Sequence[str]) -> Named:
        (name,) = names
        return {f"{name}.weight": wholly(weight.weight)}

    def part(self, weight: DenseRows, rows: Span) -> DenseRows:
        return DenseRows(weight.weight[rows.first : rows.end])

    def apply(self, ids: Tensor, weight: DenseRows) -> Tensor:
        return weight.weight.index_select(0, ids)

    def project(self, hidden: Tensor, weight: DenseRows) -> Tensor:
        return linear(hidden, weight.weight, None)

    def table(self, weight: DenseRows) -> Tensor:
        return weight.weight.detach()


class DenseLatents(NamedTuple):
    """Views of one parameter, by head."""

    kv_b: nn.Parameter  # [heads, key_dim + value_dim, rank]
    heads: Span
    keys: Tensor  # [heads, key_dim, rank]  W_UK
    values: Tensor  # [heads, rank, value_dim]  W_UV, transposed


class DenseLatent(LatentFormat[DenseLatents]):
    def allocate(
        self, heads: Span, key_dim: int, value_dim: int, rank: int, *, placement: Placement
    ) -> DenseLatents:
        kv_b = empty_parameter(heads.size, key_dim + value_dim, rank, placement=placement)
        keys, values = kv_b.split((key_dim, value_dim), dim=1)
        return DenseLatents(kv_b, heads, keys, values.mT)

    def fill(self, weight: DenseLatents, names: Sequence[str]) -> Named:
        (name,) = names
        _, rows, rank = weight.kv_b.shape
        view = weight.kv_b.flatten(0, 1)
        return {f"{name}.weight": partly(view, weight.heads.times(rows), whole(rank))}

    def apply_keys(self, q: Tensor, weight: DenseLatents, out: Tensor) -> None:
        head_products(q, weight.keys, out)

    def apply_values(self, attended: Tensor, weight: DenseLatents, out: Tensor) -> None:
        head_products(attended, weight.values, out)

    def expand(self, latents: Tensor, weight: DenseLatents) -> tuple[Tensor, Tensor]:
        key_dim, value_dim = weight.keys.shape[1], weight.values.shape[2]
        made = linear(latents, weight.kv_b.flatten(0, 1), None)
        keys, values = made.unflatten(1, (-1, key_dim + value_dim)).split((key_dim, value_dim), 2)
        return keys, values


class DenseStack(NamedTuple):
    """Every expert's projections; see `ExpertWeights`."""

    gate_up: nn.Parameter  # [experts, 2 * inter, hidden]
    down: nn.Parameter  # [experts, hidden, inter]
    gate_up_bias: nn.Parameter | None  # [experts, 2 * inter]
    down_bias: nn.Parameter | None  # [experts, hidden]
    inter: Span
    has_bias: bool  # the layer's; a rank behind the first adds none to what experts return


class DenseExperts(ExpertsFormat[DenseStack]):
    def allocate(
        self, count: int, hidden: int, inter: Span, *, bias: bool, placement: Placement
    ) -> DenseStack:
        def biases(rows: int, *, needed: bool) -> nn.Parameter | None:
            return empty_parameter(count, rows, placement=placement) if needed else None

        return DenseStack(
            gate_up=empty_matrices(count, 2 * inter.size, hidden, placement=placement),
            down=empty_matrices(count, hidden, inter.size, placement=placement),
            gate_up_bias=biases(2 * inter.size, needed=bias),
            down_bias=biases(hidden, needed=bias and inter.first == 0),
            inter=inter,
            has_bias=bias,
        )

    def fill(self, weight: DenseStack, names: Sequence[str]) -> Named:
        """Stored as [count, in, out], gate and up columns in turns as our rows."""
        gate_up, down = names
        count, hidden, _ = weight.down.shape
        experts, rows = whole(count), weight.inter.times(2)
        named = {
            gate_up: partly(weight.gate_up.mT, experts, whole(hidden), rows),
            down: partly(weight.down.mT, experts, weight.inter, whole(hidden)),
        }
        if weight.gate_up_bias is not None:
            named[f"{gate_up}_bias"] = partly(weight.gate_up_bias, experts, rows)
            unused = Destination((count, hidden), weight.down.dtype, ())
            bias = weight.down_bias
            named[f"{down}_bias"] = unused if bias is None else wholly(bias)
        return named

    def fill_each(self, weight: DenseStack, names: Sequence[ExpertNames]) -> Named:
        """Without biases: no checkpoint has tensors of each expert's."""
        assert not weight.has_bias, "biases of experts with tensors of their own"
        inter, hidden = weight.inter, whole(weight.down.shape[1])
        named: Named = {}
        for name, gate_up, down in zip(names, weight.gate_up, weight.down, strict=True):
            named[f"{name.gate}.weight"] = partly(gate_up[::2], inter, hidden)
            named[f"{name.up}.weight"] = partly(gate_up[1::2], inter, hidden)
            named[f"{name.down}.weight"] = partly(down, hidden, inter)
        return named

    def share(self, weight: DenseStack) -> str:
        return share_of_columns(len(weight.down), weight.inter)

    def apply(self, x: Tensor, routing: Routing, weight: DenseStack, gate: SwiGLU) -> Tensor:
        return moe_experts(x, routing, _weights(weight), gate)

    def apply_plus(
        self, x: Tensor, routing: Routing, weight: DenseStack, gate: SwiGLU, plus: Tensor
    ) -> Tensor:
        return moe_experts(x, routing, _weights(weight), gate, plus)


def _weights(weight: DenseStack) -> ExpertWeights:
    return ExpertWeights(weight.gate_up, weight.gate_up_bias, weight.down, weight.down_bias)


DENSE = WeightFormats(
    linear=DenseLinear(),
    embedding=DenseTable(),
    head=DenseLinear(splits=False),
    latent=DenseLatent(),
    experts=DenseExperts(),
)
