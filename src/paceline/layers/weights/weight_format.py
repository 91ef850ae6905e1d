"""WeightFormat: how the weight of a layer is stored, filled from a checkpoint and multiplied with.

A format is frozen and has no state.  `allocate` makes a weight, a NamedTuple that has all its
tensors, which stay where they are: graphs hold their addresses.  The loader copies the tensors of a
checkpoint into the views that `fill` names, each once, and then calls `finish`, which derives in
place what is not as it was stored.  A layer knows no checkpoint names and no numbers' format: it
has a `Held`, and asks its format for a product.  What is a parameter is filled by a checkpoint;
what `finish` derives beside it is a plain tensor.

A product takes the rows of a step and the weight.  Facts of those rows, as which adapter each has,
will be an argument of `apply` with the first format that reads them: today none does.

There is one kind of format for each thing that layers multiply with; `WeightFormats` has one of
each, and `Placement` brings them to the layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from paceline.core.parallel import Span, whole
from paceline.kernels.act_and_mul import act_and_mul, activate
from paceline.kernels.moe_experts import SwiGLU
from paceline.kernels.moe_route import Routing

if TYPE_CHECKING:
    from paceline.layers.weights.parameter import Placement


class TensorPart(NamedTuple):
    """A part of a stored tensor, and the view of a parameter that it fills."""

    into: Tensor
    cut: tuple[Span, ...]  # [dims of the stored tensor]

    @property
    def parameter(self) -> Tensor:
        """What `into` is, or is a view of."""
        return self.into if self.into._base is None else self.into._base

    @property
    def place(self) -> tuple[slice, ...]:
        """As an index of the stored tensor."""
        return tuple(slice(span.first, span.end) for span in self.cut)


class Destination(NamedTuple):
    """What one stored tensor fills: of one process a whole view; of a rank its part, or nothing."""

    shape: tuple[int, ...]  # of the stored tensor
    dtype: torch.dtype  # of what it fills
    blocks: tuple[TensorPart, ...]

    def copy_(self, stored: Tensor) -> None:
        """Fill it."""
        for block in self.blocks:
            block.into.copy_(stored[block.place])


Named = dict[str, Destination]  # by checkpoint tensor name


def wholly(view: Tensor) -> Destination:
    """A stored tensor that fills a view of a parameter, on every rank."""
    return Destination(
        tuple(view.shape), view.dtype, (TensorPart(view, tuple(map(whole, view.shape))),)
    )


def partly(view: Tensor, *cut: Span) -> Destination:
    """A stored tensor of which a rank holds a part.  cut: [dims]"""
    return Destination(tuple(span.total for span in cut), view.dtype, (TensorPart(view, cut),))


def of_another_rank(target: Destination) -> Destination:
    """A stored tensor as `target`'s, of which this rank holds nothing."""
    return target._replace(blocks=())


def by_part(
    names: Sequence[str],
    kind: str,
    held: Tensor,
    parts: Sequence[Span],
    behind: tuple[Span, ...],
) -> Named:
    """What fills the rows of `parts` in `held`; one name: they lie behind each other in one tensor.

    behind: of the dimensions of `held` behind its rows.
    """
    views = held.split([part.size for part in parts])
    if len(names) == len(parts):
        return {
            f"{name}.{kind}": partly(view, part, *behind)
            for name, view, part in zip(names, views, parts, strict=True)
        }
    (name,) = names
    blocks, stored = [], 0
    for view, part in zip(views, parts, strict=True):
        blocks.append(TensorPart(view, (part._replace(first=stored + part.first), *behind)))
        stored += part.total
    shape = (stored, *(span.total for span in behind))
    return {f"{name}.{kind}": Destination(shape, held.dtype, tuple(blocks))}


def without_bias(names: Sequence[str], parts: Sequence[Span], dtype: torch.dtype) -> Named:
    """Biases of a layer that another rank adds."""
    return {
        f"{name}.bias": Destination((part.total,), dtype, ())
        for name, part in zip(names, parts, strict=True)
    }


Weight = TypeVar("Weight", bound=tuple[Any, ...])  # a NamedTuple


class WeightFormat(ABC, Generic[Weight]):
    """What formats of every kind have."""

    def __str__(self) -> str:
        return "plain numbers"

    @abstractmethod
    def fill(self, weight: Weight, names: Sequence[str]) -> Named:
        """What a checkpoint fills.

        names: what checkpoints call the layer's parts, in order, or one where they have one tensor
        for all of them; the format adds what it calls its own tensors.  Together the views are
        every parameter of `weight`, each number once.
        """

    def finish(self, weight: Weight) -> None:
        """Derive, in place, what is not as it was stored; called once, when all else is filled."""

    def scales(self, weight: Weight) -> tuple[Tensor, ...]:
        """Tensors that `allocate` made all NaN (`parameter.empty_scale`), so that a number which
        neither a checkpoint nor `finish` wrote is seen: the loader refuses one that is left."""
        return ()

    def set_noise(
        self, weight: Weight, normal: Callable[[tuple[int, ...]], Tensor]
    ) -> tuple[Tensor, ...]:
        """Make dummy weights of what is no number itself, and return the parameters written.

        normal: a shape -> float32 noise on the model's device."""
        return ()


class LinearFormat(WeightFormat[Weight]):
    """Of projections, fused or not, and of a language-model head of its own."""

    @abstractmethod
    def allocate(
        self, parts: Sequence[Span], columns: Span, *, bias: bool, placement: "Placement"
    ) -> Weight:
        """parts: output features of each projection of one product, in order; columns: inputs.  Of
        ranks that hold columns the first adds the bias."""

    @abstractmethod
    def apply(self, x: Tensor, weight: Weight) -> Tensor:
        """x [tokens, columns held] -> [tokens, sum of parts held] in x's dtype; recordable."""

    def apply_gated(self, x: Tensor, weight: Weight, activation: str) -> Tensor:
        """act(gate) * up, of two parts of one size; activation: of act_and_mul.ACTIVATIONS."""
        return act_and_mul(self.apply(x, weight), activation)

    def apply_then(self, x: Tensor, weight: Weight, activation: str) -> Tensor:
        """act(product); activation: of act_and_mul.ACTIVATIONS."""
        return activate(self.apply(x, weight), activation)

    def apply_in_parts(self, x: Tensor, weight: Weight) -> Tensor | None:
        """[parts, tokens, rows] float32 whose sum is the product, where that is the faster way for
        who adds it to something anyway; None elsewhere."""
        return None

    def weight_to_add(self, x: Tensor, weight: Weight) -> Tensor | None:
        """[rows, columns held], where `add_linear` with it is the faster way for who adds the
        product to the stream anyway; None elsewhere."""
        return None


class TableFormat(WeightFormat[Weight]):
    """Of the token embedding, which a language-model head may share."""

    @abstractmethod
    def allocate(
        self, rows: int, columns: int, *, placement: "Placement", has_head: bool
    ) -> Weight:
        """has_head: each step calls `project`, which reads all of it, beside `apply`."""

    @abstractmethod
    def apply(self, ids: Tensor, weight: Weight) -> Tensor:
        """ids [tokens] int64 -> a new tensor [tokens, columns]; recordable."""

    @abstractmethod
    def part(self, weight: Weight, rows: Span) -> Weight:
        """Some rows of the same table."""

    @abstractmethod
    def project(self, hidden: Tensor, weight: Weight) -> Tensor:
        """hidden [rows, columns] -> its products with all rows of the table, of a tied head."""

    @abstractmethod
    def table(self, weight: Weight) -> Tensor:
        """[rows, columns] in the model's dtype, for a drafter that looks rows up itself."""


class LatentFormat(WeightFormat[Weight]):
    """Of latent attention's projection from latents to keys and values.  Where it is absorbed it is
    not multiplied with latents: each head has its half of it in front of attention, and its half
    behind."""

    @abstractmethod
    def allocate(
        self, heads: Span, key_dim: int, value_dim: int, rank: int, *, placement: "Placement"
    ) -> Weight: ...

    @abstractmethod
    def apply_keys(self, q: Tensor, weight: Weight, out: Tensor) -> None:
        """q [tokens, heads, key_dim] into out [tokens, heads, rank], whose rows may lie apart;
        recordable."""

    @abstractmethod
    def apply_values(self, attended: Tensor, weight: Weight, out: Tensor) -> None:
        """attended [tokens, heads, rank] into out [tokens, heads, value_dim]; recordable."""

    @abstractmethod
    def expand(self, latents: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """latents [tokens, rank], rows may lie apart -> keys [tokens, heads, key_dim] and values
        [tokens, heads, value_dim], new, whose rows may lie apart; recordable."""


class ExpertNames(NamedTuple):
    """What checkpoints call the projections of one expert, or of all in one tensor each."""

    gate: str
    up: str
    down: str


class ExpertsFormat(WeightFormat[Weight]):
    """Of the experts of one layer.  `fill` takes two names, of all gates and ups and of all downs,
    for checkpoints that have one tensor for all experts."""

    @abstractmethod
    def allocate(
        self, count: int, hidden: int, inter: Span, *, bias: bool, placement: "Placement"
    ) -> Weight:
        """inter: a rank's part of every expert's columns; where blocks of the format forbid it, the
        rank holds whole experts instead.  Of ranks the first adds the biases of what the experts
        return."""

    @abstractmethod
    def fill_each(self, weight: Weight, names: Sequence[ExpertNames]) -> Named:
        """As `fill`, for checkpoints with tensors of each expert.  names: [count]"""

    @abstractmethod
    def share(self, weight: Weight) -> str:
        """What a rank holds of the layer's experts, and why; for people."""

    @abstractmethod
    def apply(self, x: Tensor, routing: Routing, weight: Weight, gate: SwiGLU) -> Tensor:
        """x [tokens, hidden] -> a new tensor [tokens, hidden], a rank's part of the sum over its
        experts; as `moe_experts`."""

    def apply_plus(
        self, x: Tensor, routing: Routing, weight: Weight, gate: SwiGLU, plus: Tensor
    ) -> Tensor:
        """What `apply` returns, rounded, plus `plus` [tokens, hidden]."""
        return self.apply(x, routing, weight, gate).add_(plus)


def share_of_columns(count: int, inter: Span) -> str:
    """As of `ExpertsFormat.share`, where a rank holds a part of every expert."""
    return f"{inter.size} of {inter.total} columns of each of {count} experts"


class WeightFormats(NamedTuple):
    """Of the layers of a model, by kind."""

    linear: LinearFormat[Any]
    embedding: TableFormat[Any]
    head: LinearFormat[Any]
    latent: LatentFormat[Any]
    experts: ExpertsFormat[Any]


Format = TypeVar("Format", bound=WeightFormat[Any])


@dataclass(frozen=True, slots=True, eq=False)
class Held(Generic[Format]):
    """A layer's weight, and the format that reads it."""

    format: Format
    weight: Any  # as of format.allocate

    def fill(self, *names: str) -> Named:
        """As of the format."""
        return self.format.fill(self.weight, names)


def hold(layer: nn.Module, format_: Format, weight: Any) -> Held[Format]:
    """Give `layer` the tensors of `weight` as its own, by the names of their fields."""
    for name, value in weight._asdict().items():
        if isinstance(value, Tensor):
            setattr(layer, name, value)
    return Held(format_, weight)


def held_by(model: nn.Module) -> dict[str, Held[Any]]:
    """Every weight that a layer of `model` holds, by the layer's name."""
    return {
        name: value
        for name, layer in model.named_modules()
        for value in vars(layer).values()
        if type(value) is Held
    }
