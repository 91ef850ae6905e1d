"""Weights as plain numbers of the model's dtype: bfloat16, float16 or float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from paceline.kernels.linear import gated_linear, linear
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU, moe_experts
from paceline.kernels.moe_route import Routing
from paceline.kernels.skinny_linear import arrival_counters
from paceline.layers.parameter import Placement, empty_matrices, empty_matrix, empty_parameter
from paceline.layers.weight_format import (
    ExpertNames,
    ExpertsFormat,
    LatentFormat,
    LinearFormat,
    Named,
    TableFormat,
    WeightFormats,
)


class DenseMatrix(NamedTuple):
    """Projections as blocks of rows."""

    weight: nn.Parameter  # [sum of parts, columns]
    bias: nn.Parameter | None  # [sum of parts]
    counters: Tensor | None  # [tiles]  int32  see `skinny_linear`; None: no product is split
    parts: tuple[int, ...]  # rows of each


@dataclass(frozen=True, slots=True)
class DenseLinear(LinearFormat[DenseMatrix]):
    """splits: whether the product of a layer of one part may be split among processors."""

    splits: bool = True

    def allocate(
        self, parts: Sequence[int], columns: int, *, bias: bool, placement: Placement
    ) -> DenseMatrix:
        rows = sum(parts)
        is_split = self.splits and len(parts) == 1
        return DenseMatrix(
            weight=empty_matrix(rows, columns, placement=placement, has_bias=bias),
            bias=empty_parameter(rows, placement=placement) if bias else None,
            counters=arrival_counters(rows, device=placement.device) if is_split else None,
            parts=tuple(parts),
        )

    def fill(self, weight: DenseMatrix, names: Sequence[str]) -> Named:
        parts = weight.parts if len(names) > 1 else (sum(weight.parts),)
        return {
            f"{name}.{kind}": block
            for kind, whole in (("weight", weight.weight), ("bias", weight.bias))
            if whole is not None
            for name, block in zip(names, whole.split(parts), strict=True)
        }

    def apply(self, x: Tensor, weight: DenseMatrix) -> Tensor:
        return linear(x, weight.weight, weight.bias, counters=weight.counters)

    def apply_gated(self, x: Tensor, weight: DenseMatrix, activation: str) -> Tensor:
        return gated_linear(x, weight.weight, weight.bias, activation)


class DenseRows(NamedTuple):
    weight: nn.Parameter  # [rows, columns]


class DenseTable(TableFormat[DenseRows]):
    def allocate(self, rows: int, columns: int, *, placement: Placement) -> DenseRows:
        return DenseRows(empty_parameter(rows, columns, placement=placement))

    def fill(self, weight: DenseRows, names: Sequence[str]) -> Named:
        (name,) = names
        return {f"{name}.weight": weight.weight}

    def apply(self, ids: Tensor, weight: DenseRows) -> Tensor:
        return weight.weight.index_select(0, ids)

    def project(self, hidden: Tensor, weight: DenseRows) -> Tensor:
        return linear(hidden, weight.weight, None)

    def table(self, weight: DenseRows) -> Tensor:
        return weight.weight.detach()


class DenseLatents(NamedTuple):
    """Views of one parameter, by head."""

    kv_b: nn.Parameter  # [heads, key_dim + value_dim, rank]
    keys: Tensor  # [heads, key_dim, rank]  W_UK
    values: Tensor  # [heads, rank, value_dim]  W_UV, transposed


class DenseLatent(LatentFormat[DenseLatents]):
    def allocate(
        self, heads: int, key_dim: int, value_dim: int, rank: int, *, placement: Placement
    ) -> DenseLatents:
        kv_b = empty_parameter(heads, key_dim + value_dim, rank, placement=placement)
        keys, values = kv_b.split((key_dim, value_dim), dim=1)
        return DenseLatents(kv_b, keys, values.mT)

    def fill(self, weight: DenseLatents, names: Sequence[str]) -> Named:
        (name,) = names
        return {f"{name}.weight": weight.kv_b.flatten(0, 1)}

    def apply_keys(self, q: Tensor, weight: DenseLatents) -> Tensor:
        return q.bmm(weight.keys)

    def apply_values(self, attended: Tensor, weight: DenseLatents) -> Tensor:
        return attended.bmm(weight.values)


class DenseExperts(ExpertsFormat[ExpertWeights]):
    def allocate(
        self, count: int, hidden: int, inter: int, *, bias: bool, placement: Placement
    ) -> ExpertWeights:
        def of_rows(rows: int) -> nn.Parameter | None:
            return empty_parameter(count, rows, placement=placement) if bias else None

        return ExpertWeights(
            gate_up=empty_matrices(count, 2 * inter, hidden, placement=placement),
            gate_up_bias=of_rows(2 * inter),
            down=empty_matrices(count, hidden, inter, placement=placement),
            down_bias=of_rows(hidden),
        )

    def fill(self, weight: ExpertWeights, names: Sequence[str]) -> Named:
        """Stored as [count, in, out], gate and up columns in turns as our rows."""
        gate_up, down = names
        named = {gate_up: weight.gate_up.mT, down: weight.down.mT}
        if weight.gate_up_bias is not None and weight.down_bias is not None:
            named[f"{gate_up}_bias"] = weight.gate_up_bias
            named[f"{down}_bias"] = weight.down_bias
        return named

    def fill_each(self, weight: ExpertWeights, names: Sequence[ExpertNames]) -> Named:
        """Without biases: no checkpoint has tensors of each expert's."""
        assert weight.gate_up_bias is None, "biases of experts with tensors of their own"
        named: Named = {}
        for name, gate_up, down in zip(names, weight.gate_up, weight.down, strict=True):
            named[f"{name.gate}.weight"] = gate_up[::2]
            named[f"{name.up}.weight"] = gate_up[1::2]
            named[f"{name.down}.weight"] = down
        return named

    def apply(self, x: Tensor, routing: Routing, weight: ExpertWeights, gate: SwiGLU) -> Tensor:
        return moe_experts(x, routing, weight, gate)


DENSE = WeightFormats(
    linear=DenseLinear(),
    embedding=DenseTable(),
    head=DenseLinear(splits=False),
    latent=DenseLatent(),
    experts=DenseExperts(),
)
