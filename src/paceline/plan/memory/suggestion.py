"""Suggestion: commands that fit where the asked one does not, as people and programs read them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from paceline.core.gpus import gib
from paceline.core.options.engine_options import EngineOptions
from paceline.core.options.spec import spec_of

Asked = Mapping[str, object]  # by field name of EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One option that differs from what was asked."""

    option: str
    flag: str
    was: object  # asked, or what the engine would have chosen
    now: object  # None: left to the engine

    def __str__(self) -> str:
        to = "what the engine chooses" if self.now is None else self.now
        return f"{self.flag} from {self.was} to {to}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A set of options that fits."""

    asked: Asked
    changes: tuple[Change, ...]

    @property
    def flags(self) -> str:
        """What to type after a verb: what was asked with the changes, quoted for a shell."""
        return shlex.join(flag_words(self.asked))

    @property
    def line(self) -> str:
        """A whole command."""
        return f"paceline generate {self.flags} --prompt Hello"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """What to do about a configuration that does not fit."""

    commands: tuple[Command, ...]  # the nearest, then others with as few changes; empty: none fits
    short_by_bytes: int  # with everything at its least; 0 where a command fits
    weights_over_bytes: int  # of it, weights beyond the usable memory at the smallest format
    devices: tuple[str, ...]  # where the ask fits as it stands; only where no command fits
    models: tuple[str, ...]  # shipped shapes that fit here; only where no command fits

    def advice(self) -> str:
        """The remedy of an error."""
        if self.commands:
            first = self.commands[0]
            changed = ", ".join(map(str, first.changes))
            return f"the nearest that fits changes {changed}: {first.flags}"
        over, short = gib(self.weights_over_bytes), gib(self.short_by_bytes)
        why = f"it stays short by {short} with every option at its least"
        if self.weights_over_bytes:
            why = f"the weights alone exceed the usable memory by {over}"
        return (
            f"no option helps: {why}; GPUs that would hold it: {_listed(self.devices)}; shipped "
            f"models that fit here: {_listed(self.models)}"
        )

    def show(self) -> str:
        """The same for people."""
        if not self.commands:
            return self.advice()
        rows = []
        for index, command in enumerate(self.commands):
            title = "or" if index else "nearest command that fits"
            changed = ", ".join(map(str, command.changes))
            rows += [f"{title} (changes {changed})", f"  {command.line}"]
        return "\n".join(rows)

    def to_json(self) -> dict[str, object]:
        """The document `paceline explain --json` carries under "nearest"."""
        return {
            "commands": [
                {"command": command.line, "changes": [asdict(c) for c in command.changes]}
                for command in self.commands
            ],
            "short_by_bytes": self.short_by_bytes,
            "weights_over_bytes": self.weights_over_bytes,
            "devices": list(self.devices),
            "models": list(self.models),
        }


def flag_words(asked: Asked) -> list[str]:
    """The words that ask for the same on a command line; open values are left out."""
    words = []
    for option in fields(EngineOptions):
        value, spec = asked.get(option.name), spec_of(option)
        if value is None or (value == "auto" and option.default is None):
            continue
        if value is True:
            words.append(spec.flags[0])
        elif value is False:
            words += spec.off_flags[:1]
        elif isinstance(value, (tuple, list)):
            words += [word for item in value for word in (spec.flags[0], str(item))]
        else:
            words += [spec.flags[0], str(value)]
    return words


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
