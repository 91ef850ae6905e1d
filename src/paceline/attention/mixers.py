"""Mixers: the ways in which a layer mixes the tokens of a request, and who computes each.

`LayerSpec.mixer` names a kind.  Softmax attention has a contract of its own (attention/contract.py)
and a chooser (attention/registry.py); a backend of any other kind is a `StateBackend`.
"""

from collections.abc import Iterable, Mapping

from paceline.attention.registry import BACKENDS
from paceline.attention.states import StateBackend, StateCapabilities
from paceline.core.errors import ConfigError, ModelError
from paceline.core.model_config import SOFTMAX, LayerSpec
from paceline.core.plugins import load_class, missing_of

# Kind -> the registry of its backends: short name -> "module:Class", imported when asked for.  Of a
# kind beside softmax attention the first serves.
REGISTRIES: dict[str, Mapping[str, str]] = {SOFTMAX: BACKENDS}


def load_mixers(layers: Iterable[LayerSpec]) -> dict[str, StateBackend]:
    """By kind, who runs the layers that mix otherwise than by softmax attention.

    Raises ModelError for a kind without a backend, ConfigError for a backend of another kind.
    """
    first: dict[str, int] = {}
    for index, layer in enumerate(layers):
        first.setdefault(layer.mixer, index)
    return {kind: _load(kind, index) for kind, index in first.items() if kind != SOFTMAX}


def load_state_backend(name: str) -> StateBackend:
    """The one of a short name in any registry, or of a class `package.module:Class`.

    Raises ConfigError.
    """
    known = {
        short: target
        for kind, targets in REGISTRIES.items()
        if kind != SOFTMAX
        for short, target in targets.items()
    }
    found = load_class("state backend", known.get(name, name), StateBackend)  # type: ignore[type-abstract]
    wanted = {"kind": str, "name": str, "capabilities": StateCapabilities}
    missing = missing_of(found, wanted)
    if missing:
        raise ConfigError.about(
            f"state backend {name}",
            expected="complete",
            got=f"no {', no '.join(missing)}",
            remedy="define what is missing; docs/architecture.md, 'The state contract', has a "
            "whole one",
        )
    return found()


def _load(kind: str, layer_id: int) -> StateBackend:
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
    found = load_class(what, target, StateBackend)()  # type: ignore[type-abstract]
    if getattr(found, "kind", None) != kind:
        raise ConfigError.about(
            what,
            expected=f"of kind {kind}",
            got=f"{target} of kind {getattr(found, 'kind', None)}",
            remedy="register it under its own kind",
        )
    return found
