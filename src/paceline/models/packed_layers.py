"""Which layers of a model keep their weights packed.

A layer knows no names, and what it holds goes by the names that a checkpoint has for its parts.  So
projections are built without memory, and get their format and their place when all of the model
has its names.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Span
from paceline.kernels.moe_experts import SwiGLU
from paceline.kernels.moe_route import Routing
from paceline.kernels.packed_weight import Packing
from paceline.layers.weights.dense import (
    DENSE,
    DenseExperts,
    DenseLinear,
    DenseMatrix,
    DenseStack,
)
from paceline.layers.weights.packed import PackedLinear
from paceline.layers.weights.packed_experts import PackedExperts
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import (
    ExpertNames,
    ExpertsFormat,
    LinearFormat,
    Named,
    hold,
)
from paceline.models.causal_lm import CausalLM
from paceline.models.registry import architecture

_META = torch.device("meta")
# What recipes leave as it is: heads, routers, and rates and decays of gated delta nets.
_PLAIN = ("lm_head", "gate", "router", "shared_expert_gate", "in_proj_ba")


@dataclass(frozen=True, slots=True, eq=False)
class Packings:
    """How the linear layers of a model are stored, by the canonical names of their modules."""

    by_module: Mapping[str, Packing] = field(default_factory=dict)
    made: Packing | None = None  # of all others but `_PLAIN` ones, whose numbers are encoded
    num_unread: int = 0  # weights of codes that no layer reads, which become plain numbers

    def of(self, module: str) -> Packing | None:
        """None: its numbers are plain."""
        if self.made is not None and module.rpartition(".")[2] not in _PLAIN:
            return self.made
        return self.by_module.get(module)

    def __bool__(self) -> bool:
        return bool(self.by_module) or self.made is not None

    def __str__(self) -> str:
        if self.made is not None:
            return f"{self.made}: what linear layers but heads and routers are rounded to"
        kinds = Counter(map(str, self.by_module.values()))
        stay = "; ".join(f"{count} stay {kind}" for kind, count in kinds.items())
        if not self.num_unread:
            return stay
        return f"{stay}; {self.num_unread} become plain numbers, since no layer reads them as codes"


PLAIN = Packings()


@dataclass(frozen=True, slots=True)
class _Unplaced(LinearFormat[DenseMatrix]):
    """Takes no memory, and is what `dense` would be."""

    dense: DenseLinear

    def allocate(
        self, parts: Sequence[Span], columns: Span, *, bias: bool, placement: Placement
    ) -> DenseMatrix:
        nowhere = replace(placement, device=_META)
        return self.dense.allocate(parts, columns, bias=bias, placement=nowhere)

    def fill(self, weight: DenseMatrix, names: Sequence[str]) -> Named:
        return self.dense.fill(weight, names)

    def apply(self, x: Tensor, weight: DenseMatrix) -> Tensor:
        raise AssertionError("a layer that was not placed")


@dataclass(frozen=True, slots=True)
class _UnplacedExperts(ExpertsFormat[DenseStack]):
    """Takes no memory, and is what `dense` would be."""

    dense: DenseExperts

    def allocate(
        self, count: int, hidden: int, inter: Span, *, bias: bool, placement: Placement
    ) -> DenseStack:
        nowhere = replace(placement, device=_META)
        return self.dense.allocate(count, hidden, inter, bias=bias, placement=nowhere)

    def fill(self, weight: DenseStack, names: Sequence[str]) -> Named:
        return self.dense.fill(weight, names)

    def fill_each(self, weight: DenseStack, names: Sequence[ExpertNames]) -> Named:
        return self.dense.fill_each(weight, names)

    def share(self, weight: DenseStack) -> str:
        return self.dense.share(weight)

    def apply(self, x: Tensor, routing: Routing, weight: DenseStack, gate: SwiGLU) -> Tensor:
        raise AssertionError("a layer that was not placed")


_UNPLACED = DENSE._replace(
    linear=_Unplaced(DenseLinear()),
    head=_Unplaced(DenseLinear(splits=False)),
    experts=_UnplacedExperts(DenseExperts()),
)


def build_model(
    config: ModelConfig, packings: Packings, *, placement: Placement, **where: Any
) -> CausalLM:
    """A model with uninitialised weights, of which those in `packings` are packed; placement,
    where: as of its architecture's build."""
    build = architecture(config.model_type).build
    if not packings:
        return build(config, placement=placement, **where)
    model = build(config, placement=replace(placement, formats=_UNPLACED), **where)
    names = _names(model)
    for layer in list(model.modules()):
        held = vars(layer).get("held")
        if held is not None and isinstance(held.format, _Unplaced):
            found = _one_packing(packings, names[id(held.weight.weight)])
            _hold(layer, held.weight, *_placed(held.format.dense, held.weight, found, placement))
        elif held is not None and isinstance(held.format, _UnplacedExperts):
            weight: DenseStack = held.weight
            gate_up, down = (
                _one_packing(packings, names[id(each)]) for each in (weight.gate_up, weight.down)
            )
            made = _placed_experts(held.format.dense, weight, gate_up, down, placement)
            _hold(layer, weight, *made)
    return model


def packed_modules(model: CausalLM) -> set[str]:
    """The canonical names of modules whose weights `model` keeps packed."""
    names = (name.rpartition(".") for name in model.destinations())
    return {module for module, _, last in names if last == "words"}


def _names(model: CausalLM) -> dict[int, list[str]]:
    """The tensors that fill a parameter, by its id."""
    found: dict[int, list[str]] = {}
    for name, target in model.destinations().items():
        for block in target.blocks:
            found.setdefault(id(block.parameter), []).append(name)
    return found


def _one_packing(packings: Packings, names: Sequence[str]) -> Packing | None:
    """What all of these tensors are; None where they differ, and for stacks of all experts, which
    no module has a weight of its own in."""
    modules = {module if last == "weight" else None for module, _, last in _split(names)}
    found = {None if module is None else packings.of(module) for module in modules}
    return found.pop() if len(found) == 1 else None


def _split(names: Sequence[str]) -> list[tuple[str, str, str]]:
    return [name.rpartition(".") for name in names if not name.endswith(".bias")]


def _placed(
    dense: DenseLinear, weight: DenseMatrix, packing: Packing | None, placement: Placement
) -> tuple[LinearFormat[Any], Any]:
    format_: LinearFormat[Any] = dense
    if packing is not None and (packed := PackedLinear(packing)).takes(weight.columns):
        format_ = packed
    return format_, format_.allocate(
        weight.parts, weight.columns, bias=weight.has_bias, placement=placement
    )


def _placed_experts(
    dense: DenseExperts,
    weight: DenseStack,
    gate_up: Packing | None,
    down: Packing | None,
    placement: Placement,
) -> tuple[ExpertsFormat[Any], Any]:
    count, hidden, _ = weight.down.shape
    format_: ExpertsFormat[Any] = dense
    if gate_up is not None and down is not None:
        packed = PackedExperts(gate_up, down)
        format_ = packed if packed.takes(count, weight.inter) else dense
    return format_, format_.allocate(
        count, hidden, weight.inter, bias=weight.has_bias, placement=placement
    )


def _hold(layer: nn.Module, unplaced: NamedTuple, format_: Any, weight: Any) -> None:
    """Give `layer` a weight in place of one that has no memory."""
    for name, value in unplaced._asdict().items():
        if isinstance(value, Tensor):
            delattr(layer, name)
    vars(layer)["held"] = hold(layer, format_, weight)
