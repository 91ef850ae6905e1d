"""How what can be asked appears to people, and what it accepts: OptionSpec of a field of
EngineOptions, Flag of anything else a verb takes.  No torch.
"""

from dataclasses import Field, dataclass, field
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.near import did_you_mean

CHOSEN = "chosen by the engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """How a field appears to people."""

    kind: type  # str, int, float, bool, or tuple: words, each with a flag of its own
    help: str
    flags: tuple[str, ...]  # the first is ours, the others are what users of other engines type
    off_flags: tuple[str, ...] = ()  # bool only: flags that say False
    unit: str | None = None
    choices: tuple[str, ...] | None = None
    aliases: tuple[tuple[str, str], ...] = ()  # (another word, the choice it means)
    low: float | None = None  # inclusive
    high: float | None = None  # inclusive
    left_out: str = CHOSEN  # what None, where it is the default, means
    group: str  # its title in the help


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag that is no option of the engine, named after the field or argument it sets."""

    name: str
    help: str
    kind: type = str  # bool: a switch
    default: object = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    is_repeated: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def option(default: Any, kind: type, help: str, *flags: str, **facts: Any) -> Any:
    """A field of EngineOptions with its OptionSpec; `facts` are the rest of that."""
    spec = OptionSpec(kind=kind, help=help, flags=flags, **facts)
    return field(default=default, metadata={"option": spec})


def spec_of(option: Field[Any]) -> OptionSpec:
    """The OptionSpec a field of EngineOptions carries."""
    spec: OptionSpec = option.metadata["option"]
    return spec


def check(option: Field[Any], value: object) -> None:
    """Raise ConfigError unless a field of EngineOptions may have the value."""
    spec = spec_of(option)
    if value is None and option.default is None:
        return
    if isinstance(value, int) and not isinstance(value, bool) and spec.kind is float:
        value = float(value)
    if type(value) is not spec.kind:
        raise _refusal(option, "a list" if spec.kind is tuple else spec.kind.__name__, value)
    if isinstance(value, tuple) and not all(isinstance(word, str) and word for word in value):
        raise _refusal(option, "a list of non-empty str", value)
    if spec.choices is not None and value not in spec.choices:
        remedy = _remedy(option)
        if isinstance(value, str):
            words = [*spec.choices, *(word for word, _ in spec.aliases)]
            remedy = did_you_mean(value, words, otherwise=remedy)
        raise _refusal(option, "one of " + ", ".join(spec.choices), value, remedy)
    low, high = spec.low, spec.high
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Written so that NaN fails.
        above = low is None or value >= low
        below = high is None or value <= high
        if not (above and below):
            wanted = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
            raise _refusal(option, wanted, value)


def _remedy(option: Field[Any]) -> str:
    spec = spec_of(option)
    remedy = f"set {spec.flags[0]} accordingly"
    if option.default is None:
        remedy += " or leave it out"
        remedy += " to let the engine decide" if spec.left_out == CHOSEN else ""
    return remedy


def _refusal(
    option: Field[Any], expected: str, got: object, remedy: str | None = None
) -> ConfigError:
    unit = f" {spec_of(option).unit}" if spec_of(option).unit else ""
    return ConfigError.about(
        option.name,
        expected=expected + unit,
        got=repr(got),
        remedy=remedy or _remedy(option),
    )
