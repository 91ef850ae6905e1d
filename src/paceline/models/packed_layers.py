"""Which layers of a model keep their weights packed.

A layer knows no names, and what it holds goes by the names that a checkpoint has for its parts.  So
projections are built without memory, and get their format and their place when all of the model
has its names.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Span
from paceline.kernels.packed_weight import Packing
from paceline.layers.weights.dense import DENSE, DenseLinear, DenseMatrix
from paceline.layers.weights.packed import PackedLinear
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import LinearFormat, Named, hold
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
            return f"{self.made}: what linear layers but heads, routers and experts are rounded to"
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


_UNPLACED = DENSE._replace(
    linear=_Unplaced(DenseLinear()), head=_Unplaced(DenseLinear(splits=False))
)


def build_model(config: ModelConfig, packings: Packings, **where: Any) -> CausalLM:
    """A model with uninitialised weights, of which those in `packings` are packed; where: as of its
    architecture's build."""
    build = architecture(config.model_type).build
    if not packings:
        return build(config, **where)
    model = build(config, formats=_UNPLACED, **where)
    placement = Placement(where["device"], where["dtype"], DENSE, where.get("exchange"))
    names = _names(model)
    for layer in list(model.modules()):
        held = vars(layer).get("held")
        if held is not None and isinstance(held.format, _Unplaced):
            _place(layer, packings, names[id(held.weight.weight)], placement)
    return model


def packed_modules(model: CausalLM) -> set[str]:
    """The canonical names of modules whose weights `model` keeps packed."""
    names = (name.rpartition(".") for name in model.destinations())
    return {module for module, _, last in names if last == "words"}


def _names(model: CausalLM) -> dict[int, list[str]]:
    """The modules whose weights fill a parameter, by its id."""
    found: dict[int, list[str]] = {}
    for name, target in model.destinations().items():
        for block in target.blocks:
            found.setdefault(id(block.parameter), []).append(name.rpartition(".")[0])
    return found


def _place(
    layer: nn.Module, packings: Packings, modules: Sequence[str], placement: Placement
) -> None:
    held = vars(layer)["held"]
    weight: DenseMatrix = held.weight
    format_: LinearFormat[Any] = held.format.dense
    kinds = {packings.of(module) for module in modules}
    packing = kinds.pop() if len(kinds) == 1 else None
    if packing is not None and (packed := PackedLinear(packing)).takes(weight.columns):
        format_ = packed
    for name in ("weight", "bias", "counters"):
        if hasattr(layer, name):
            delattr(layer, name)
    placed = format_.allocate(
        weight.parts, weight.columns, bias=weight.has_bias, placement=placement
    )
    vars(layer)["held"] = hold(layer, format_, placed)
