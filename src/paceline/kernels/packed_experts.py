"""packed_experts: `moe_experts` with weights in codes, which no kernel writes to memory as numbers.

A step reads the weights of the experts that its tokens take, in a half or a quarter of the bytes.
Words become numbers in registers as in `packed_linear`, and each group's part of a sum is scaled in
float32.  Gate and up rows are interleaved, as in `ExpertWeights`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.parallel import Span
from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.moe_align import max_blocks
from paceline.kernels.moe_experts import (
    ExpertWeights,
    SwiGLU,
    moe_experts_reference,
    require_experts,
    require_routed,
)
from paceline.kernels.moe_route import Routing
from paceline.kernels.packed_linear import require_packed
from paceline.kernels.packed_weight import PackedWeight, Packing, unpack_reference
from paceline.kernels.stand_in import device_type

_DTYPES = (torch.bfloat16, torch.float16)
_FEWEST_ROWS = 16  # of a tile


class PackedMatrices(NamedTuple):
    """One projection of every expert: [experts, rows, columns] numbers."""

    packed: PackedWeight  # of [experts * rows, columns] numbers
    packing: Packing
    columns: int

    @property
    def rows(self) -> int:
        """Of all experts."""
        return self.packed.words.shape[0]


class PackedExpertWeights(NamedTuple):
    """The experts of one layer, or a rank's, without biases."""

    gate_up: PackedMatrices  # [num_experts, 2 * inter, hidden]
    down: PackedMatrices  # [num_experts, hidden, inter]

    @property
    def num_experts(self) -> int:
        return self.down.rows // self.gate_up.columns


def packed_experts_reference(
    x: Tensor,
    routing: Routing,
    weights: PackedExpertWeights,
    gate: SwiGLU,
    experts: Span | None = None,
) -> Tensor:
    """The definition: `moe_experts` of the numbers."""
    gate_up, down = (
        unpack_reference(each.packed, each.packing, each.columns).unflatten(
            0, (weights.num_experts, -1)
        )
        for each in weights
    )
    numbers = ExpertWeights(gate_up, None, down, None)
    return moe_experts_reference(x, routing, numbers, gate, experts)


def fits_packed_experts(x: Tensor) -> bool:
    """Whether `packed_experts` takes these rows; device and dtype only."""
    return device_type(x.device) == "cuda" and x.dtype in _DTYPES and x.stride(1) == 1


def packed_experts(
    x: Tensor,
    routing: Routing,
    weights: PackedExpertWeights,
    gate: SwiGLU,
    plus: Tensor | None = None,
    experts: Span | None = None,
) -> Tensor:
    """Every token through its experts, in a new tensor [tokens, hidden] of x's dtype.

    x: bfloat16 or float16 [tokens, hidden], contiguous rows; routing, plus, experts: as of
    `moe_experts`.  Mutates nothing.  Deterministic.  Graph-safe: grids depend on shapes
    only.  Raises KernelArgumentError.
    """
    if x.dim() != 2 or x.dtype not in _DTYPES or x.stride(1) != 1:
        reject(
            "x",
            expected="bfloat16 or float16 [tokens, hidden], contiguous rows",
            got=x,
            remedy="use kernels.unpack_weight and kernels.moe_experts",
        )
    require_routed(x, routing, plus)
    if weights.gate_up.columns != x.shape[1]:
        reject(
            "weights.gate_up",
            expected=f"of {x.shape[1]} columns, as x",
            got=weights.gate_up.packed.words,
            remedy="pass the experts of this layer",
        )
    for packed, packing, columns in weights:
        require_packed(packed, packing, columns, device=x.device)
    hidden, inter, rows = x.shape[1], weights.down.columns, weights.gate_up.rows
    if weights.down.rows % hidden or rows != weights.num_experts * 2 * inter:
        reject(
            "weights.down",
            expected=f"{hidden} rows for each expert, of which gate_up has {2 * inter}",
            got=weights.down.packed.words,
            remedy="pass the experts of this layer",
        )
    experts = require_experts(experts, weights.num_experts)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    operands = [
        each
        for packed, packing, columns in weights
        for each in (*packed, packing.kind, packing.group or columns)
    ]
    columns, of_routing = weights.down.columns, (experts.first, experts.total)
    _PACKED_EXPERTS(x, *routing, *operands, columns, *gate, *of_routing, plus, out)
    return out


def _launch(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_zero: Tensor | None,
    gate_up_kind: str,
    gate_up_group: int,
    down: Tensor,
    down_scale: Tensor,
    down_zero: Tensor | None,
    down_kind: str,
    down_group: int,
    inter: int,
    alpha: float,
    limit: float | None,
    up_offset: float,
    first_expert: int,
    num_experts: int,
    plus: Tensor | None,
    out: Tensor,
) -> None:
    require_triton("packed_experts", otherwise="use kernels.unpack_weight and kernels.moe_experts")
    from paceline.kernels._triton.packed_experts import Words, launch_packed_experts

    launch_packed_experts(
        x,
        Routing(routing_weights, expert_ids),
        Words(PackedWeight(gate_up, gate_up_scale, gate_up_zero), gate_up_kind, gate_up_group),
        Words(PackedWeight(down, down_scale, down_zero), down_kind, down_group),
        inter=inter,
        gate=SwiGLU(alpha, limit, up_offset),
        experts=Span(first_expert, down.shape[0] // x.shape[1], num_experts),
        plus=plus,
        out=out,
    )


def _scratch(x: Tensor, _: Tensor, expert_ids: Tensor, *others: object) -> tuple[int, ...]:
    """Of each pair of a token and its expert: its place among tiles, gated, the result."""
    down, inter = others[5], others[10]
    assert isinstance(down, Tensor)
    assert isinstance(inter, int)
    hidden, pairs, size = x.shape[1], expert_ids.numel(), x.element_size()
    places = (4 * pairs, 12 * max_blocks(pairs, down.shape[0] // hidden, _FEWEST_ROWS))
    return *places, pairs * inter * size, pairs * hidden * size


_PACKED_EXPERTS = define_op(
    "packed_experts(Tensor x, Tensor routing_weights, Tensor expert_ids, Tensor gate_up, "
    "Tensor gate_up_scale, Tensor? gate_up_zero, str gate_up_kind, int gate_up_group, Tensor down, "
    "Tensor down_scale, Tensor? down_zero, str down_kind, int down_group, int inter, float alpha, "
    "float? limit, float up_offset, int first_expert, int num_experts, Tensor? plus, "
    "Tensor(a!) out) -> ()",
    cpu=_launch,
    cuda=_launch,
    scratch=_scratch,
)
