"""Mixers: the ways in which a layer mixes the tokens of a request, and who computes each.

`LayerSpec.mixer` names a kind.  Softmax attention has a contract of its own (attention/contract.py)
and a chooser (attention/registry.py); a backend of any other kind is a `StateBackend`.
"""

from collections.abc import Callable, Iterable, Mapping

from paceline.attention.linear.shape import GDN, MAMBA2
from paceline.attention.registry import BACKENDS, Choice
from paceline.attention.states import StateBackend, StateCapabilities, StateConfig
from paceline.core.errors import BackendUnsupported, ConfigError, ModelError
from paceline.core.model.config import SOFTMAX, LayerSpec
from paceline.core.near import did_you_mean
from paceline.core.plugins import load_class, missing_of

# Kind -> the registry of its backends: short name -> "module:Class", imported when asked for.  Of a
# kind beside softmax attention auto takes the first that can run, and on a GPU ours before others.
REGISTRIES: dict[str, Mapping[str, str]] = {
    SOFTMAX: BACKENDS,
    GDN: {
        "torch": "paceline.attention.backends.gdn_torch:TorchGdn",
        "triton": "paceline.attention.backends.gdn_triton:TritonGdn",
    },
    MAMBA2: {
        "torch": "paceline.attention.backends.mamba2_torch:TorchMamba2",
        "triton": "paceline.attention.backends.mamba2_triton:TritonMamba2",
    },
}
_WHAT = "linear attention"
Wanted = Callable[[LayerSpec], StateConfig]  # of the first layer of a kind, what its kind asks


def choose_mixers(
    layers: Iterable[LayerSpec], asked: str | None, wanted: Wanted
) -> dict[str, Choice]:
    """By kind, who runs the layers that mix otherwise than by softmax attention.

    asked: the short name of one, `package.module:Class`, or None or auto: the first that can.
    Raises BackendUnsupported with every reason, ConfigError for an unknown name or a backend of
    another kind, ModelError for a kind without backends.
    """
    first: dict[str, int] = {}
    specs = tuple(layers)
    for index, layer in enumerate(specs):
        first.setdefault(layer.mixer, index)
    return {
        kind: _choose(kind, index, asked, wanted(specs[index]))
        for kind, index in first.items()
        if kind != SOFTMAX
    }


def load_mixers(choices: Mapping[str, Choice]) -> dict[str, StateBackend]:
    """The backends of `choose_mixers`."""
    return {kind: _load(kind, choice.name) for kind, choice in choices.items()}


def load_state_backend(name: str, *, kind: str = SOFTMAX) -> StateBackend:
    """The one of a short name, of `kind` where it has such, or of a class `package.module:Class`.

    Raises ConfigError.
    """
    others = [targets for each, targets in REGISTRIES.items() if each != SOFTMAX]
    first = [] if kind == SOFTMAX else [REGISTRIES.get(kind, {})]
    target = next((known[name] for known in [*first, *others] if name in known), name)
    found = load_class("state backend", target, StateBackend)  # type: ignore[type-abstract]
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


def _choose(kind: str, layer_id: int, asked: str | None, wanted: StateConfig) -> Choice:
    known = REGISTRIES.get(kind, {})
    if asked in (None, "auto"):
        if not known:
            raise ModelError.about(
                f"mixer of layer {layer_id}",
                expected=f"one of {', '.join(kind for kind, has in REGISTRIES.items() if has)}",
                got=repr(kind),
                remedy="add a backend of this kind to REGISTRIES of paceline.attention.mixers, or "
                "name one with --linear-attention-backend",
            )
        first = "triton" if wanted.device_type == "cuda" else "torch"
        order = sorted(known, key=lambda name: name != first)
        reasons = {name: _load(kind, name).unsupported_reasons(wanted) for name in order}
        able = [name for name, against in reasons.items() if not against]
        if not able:
            listed = [f"{name}: {each}" for name, against in reasons.items() for each in against]
            raise BackendUnsupported("auto", listed, of=_WHAT)
        rejected = {
            name: against or [f"auto prefers {able[0]}"]
            for name, against in reasons.items()
            if name != able[0]
        }
        why = f"first of {', '.join(order)} that can run on {wanted.device_type}"
        return Choice(name=able[0], why=why, rejected=rejected)
    assert asked is not None, "auto is asked for by None, too"
    against = _load(kind, asked).unsupported_reasons(wanted)
    if against:
        raise BackendUnsupported(asked, against, of=_WHAT)
    return Choice(name=asked, why="asked for", rejected={})


def _load(kind: str, name: str) -> StateBackend:
    known = REGISTRIES.get(kind, {})
    target = known.get(name, name)
    if ":" not in target:
        raise ConfigError.about(
            f"{_WHAT} backend of mixer {kind}",
            expected=", ".join([*known, "package.module:Class"]),
            got=repr(name),
            remedy=did_you_mean(
                name, known, otherwise="name one of these, or auto where an engine is to choose"
            ),
        )
    found = load_state_backend(target)
    if found.kind != kind:
        raise ConfigError.about(
            f"backend {name} of mixer {kind}",
            expected=f"of kind {kind}",
            got=f"{target} of kind {found.kind}",
            remedy="name one of the kind of the model's layers, and register it under its own",
        )
    return found
