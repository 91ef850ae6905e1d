"""Mixers: the ways in which a layer mixes the tokens of a request, and who computes each.

`LayerSpec.mixer` names a kind.  Softmax attention has a contract of its own (attention/contract.py)
and a chooser (attention/registry.py); a backend of any other kind is a `Mixer`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, NamedTuple

from torch import Tensor
from typing_extensions import TypeVar

from paceline.attention.contract import Limits
from paceline.attention.registry import BACKENDS
from paceline.core.errors import ConfigError, ModelError
from paceline.core.model_config import SOFTMAX, LayerSpec
from paceline.core.plugins import load_class
from paceline.kernels.step_view import StepView

# Kind -> the registry of its backends: short name -> "module:Class", imported when asked for.  Of a
# kind beside softmax attention the first serves.
REGISTRIES: dict[str, Mapping[str, str]] = {SOFTMAX: BACKENDS}

Buffers = TypeVar("Buffers", default=Any)
Plan = TypeVar("Plan", default=Any)


class Mixer(ABC, Generic[Buffers, Plan]):
    """Prepares and runs one kind for every layer of it in a step.

    Stateless: buffers are arguments.  Device-only and recordable: it reads nothing on the host and
    plans nothing there.
    """

    kind: str  # as layers name it
    name: str
    kept_fields: frozenset[str] = frozenset()  # of its buffers that plan does not write anew

    @abstractmethod
    def make_buffers(self, limits: Limits) -> Buffers:
        """Allocate once everything whose address a graph may hold; see AttentionBackend."""

    @abstractmethod
    def plan(self, view: StepView, buffers: Buffers) -> Plan:
        """Derive the frozen plan, in place: the same call in eager, capture and replay."""

    @abstractmethod
    def mix(self, layer_id: int, *inputs: Tensor, plan: Plan) -> Tensor:
        """One layer.  inputs: what its block computed, each [padded_tokens, ...], as is the result.
        A padded token reaches no real one."""


class MixerInUse(NamedTuple):
    """A mixer with what it holds for one model."""

    mixer: Mixer
    buffers: Any


class PlannedMixer(NamedTuple):
    """A mixer with its plan of one step."""

    mixer: Mixer
    plan: Any


def load_mixers(layers: Iterable[LayerSpec]) -> tuple[Mixer, ...]:
    """The mixers that `layers` name beside softmax attention, in order.

    Raises ModelError for a kind without a backend, ConfigError for a backend of another kind.
    """
    first: dict[str, int] = {}
    for index, layer in enumerate(layers):
        first.setdefault(layer.mixer, index)
    return tuple(_load(kind, index) for kind, index in first.items() if kind != SOFTMAX)


def _load(kind: str, layer_id: int) -> Mixer:
    targets = REGISTRIES.get(kind)
    if not targets:
        raise ModelError.about(
            f"mixer of layer {layer_id}",
            expected=f"one of {', '.join(kind for kind, has in REGISTRIES.items() if has)}",
            got=repr(kind),
            remedy="add a backend of this kind to REGISTRIES of paceline.attention.mixers",
        )
    name, target = next(iter(targets.items()))
    what = f"backend {name} of mixer {kind}"
    found = load_class(what, target, Mixer)()  # type: ignore[type-abstract]
    if getattr(found, "kind", None) != kind:
        raise ConfigError.about(
            what,
            expected=f"of kind {kind}",
            got=f"{target} of kind {getattr(found, 'kind', None)}",
            remedy="register it under its own kind",
        )
    return found


def make_mixers(layers: Iterable[LayerSpec], limits: Limits) -> tuple[MixerInUse, ...]:
    """`load_mixers`, with buffers for the largest step."""
    return tuple(MixerInUse(mixer, mixer.make_buffers(limits)) for mixer in load_mixers(layers))


def plan_mixers(mixers: Iterable[MixerInUse], view: StepView) -> dict[str, PlannedMixer]:
    """One plan for each kind."""
    return {
        each.mixer.kind: PlannedMixer(each.mixer, each.mixer.plan(view, each.buffers))
        for each in mixers
    }
