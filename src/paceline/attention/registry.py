"""The registry of attention backends, and the one place where `auto` may choose."""

from dataclasses import dataclass

from paceline.attention.contract import AttentionBackend, AttentionConfig
from paceline.core.errors import BackendUnsupported, ConfigError, message
from paceline.core.plugins import load_class

# Short name -> "module:Class", imported when asked for.  Also the order in which auto prefers.
BACKENDS: dict[str, str] = {
    "triton": "paceline.attention.backends.triton_backend:TritonBackend",
    "torch": "paceline.attention.backends.torch_backend:TorchBackend",
}
AUTO_ORDER: dict[str, tuple[str, ...]] = {"cpu": ("torch",), "cuda": ("triton",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A backend and why."""

    name: str
    why: str
    rejected: dict[str, list[str]]  # name -> every reason


def load_backend(name: str) -> type[AttentionBackend]:
    """The backend class of a short name or of `package.module:Class`.

    Raises ConfigError when there is none.
    """
    target = BACKENDS.get(name, name)
    if ":" not in target:
        raise ConfigError(
            message(
                "attention backend",
                expected=f"auto, {', '.join(BACKENDS)} or package.module:Class",
                got=repr(name),
                remedy="name one of these",
            )
        )
    return load_class("attention backend", target, AttentionBackend)  # type: ignore[type-abstract]


def choose(config: AttentionConfig, asked: str = "auto") -> Choice:
    """The backend for a model on a device.  An explicit choice runs or raises; auto says why.

    Raises BackendUnsupported with every reason, ConfigError for an unknown name.
    """
    if asked != "auto":
        reasons = load_backend(asked).unsupported_reasons(config)
        if reasons:
            raise BackendUnsupported(asked, reasons)
        return Choice(name=asked, why="asked for", rejected={})
    rejected: dict[str, list[str]] = {}
    order = AUTO_ORDER.get(config.device_type, ())
    for name in order:
        reasons = load_backend(name).unsupported_reasons(config)
        if not reasons:
            others = {
                other: load_backend(other).unsupported_reasons(config)
                or [f"auto prefers {name} on {config.device_type}"]
                for other in BACKENDS
                if other not in rejected and other != name
            }
            why = f"first of {', '.join(order)} that can run on {config.device_type}"
            return Choice(name=name, why=why, rejected=rejected | others)
        rejected[name] = reasons
    listed = [f"{name}: {reason}" for name, reasons in rejected.items() for reason in reasons]
    raise BackendUnsupported("auto", listed or [f"no backend for device {config.device_type}"])
