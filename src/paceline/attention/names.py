"""Names of attention backends, of one or composed of such: written and read here alone."""

from dataclasses import dataclass

NO_ATTENTION = "none"  # of a model none of whose layers attend; auto takes it there, and only there


@dataclass(frozen=True, slots=True)
class Pair:
    """prefill+decode; see attention/hybrid.py."""

    prefill: "Name"
    decode: "Name"

    def __str__(self) -> str:
        return f"{self.prefill}+{self.decode}"


@dataclass(frozen=True, slots=True)
class Cascade:
    """cascade(inner); see attention/cascade.py."""

    inner: "Name"

    def __str__(self) -> str:
        return f"cascade({self.inner})"


Name = str | Pair | Cascade


def parse(name: str) -> Name:
    """What a name is composed of; the + of a pair is the first that stands in no bracket."""
    for index, letter in enumerate(name):
        before = name[:index]
        if letter == "+" and before.count("(") == before.count(")"):
            return Pair(parse(before), parse(name[index + 1 :]))
    if name.startswith("cascade(") and name.endswith(")"):
        return Cascade(parse(name[len("cascade(") : -1]))
    return name


def singles(name: Name) -> tuple[str, ...]:
    """The names in a parsed one that are not composed, from left to right."""
    match name:
        case Pair(prefill, decode):
            return singles(prefill) + singles(decode)
        case Cascade(inner):
            return singles(inner)
    return (name,)
