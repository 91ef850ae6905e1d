"""Flags of verbs as data, for those that are no option of the engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag, named after the field or argument it sets."""

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
