"""Objects that clients send, and the fields of the OpenAI API that this server does not serve.

Each such field may be sent with null or with the value that asks for nothing; any other value is
refused by name, never ignored.  It is annotated with its Refusal and kept as the bytes that came:
nothing is built from them.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import ClassVar, NamedTuple, TypeVar, get_type_hints

import msgspec

from paceline.server.bodies.places import Place, shortened, written
from paceline.server.errors import ApiError

T = TypeVar("T")
Unserved = msgspec.Raw | msgspec.UnsetType
_MAX_BYTES = 200  # no allowed value is longer, blanks included


class Refusal(NamedTuple):
    """What a field may hold beside null, and what to do without it."""

    allowed: tuple[object, ...]
    remedy: str


def fields_noted(kind: type[msgspec.Struct], note: type[T]) -> dict[str, T]:
    """The fields of `kind` that are annotated with a `note`, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: found
        for name in kind.__struct_fields__
        for found in getattr(hints[name], "__metadata__", ())
        if isinstance(found, note)
    }


@cache
def refusals_of(kind: type[msgspec.Struct]) -> Mapping[str, Refusal]:
    """The fields of `kind` that are known and not served, by name."""
    return fields_noted(kind, Refusal)


def check_refusals(body: msgspec.Struct, place: Place) -> None:
    """Raise ApiError, 400, for the first field of `body` that asks for something."""
    for name, (allowed, remedy) in refusals_of(type(body)).items():
        sent = getattr(body, name)
        if sent is not msgspec.UNSET and not _is_one_of(sent, (None, *allowed)):
            expected = " or ".join(map(json.dumps, (None, *allowed)))
            raise ApiError.about(
                name,
                expected=expected,
                got=as_sent(sent),
                remedy=remedy,
                param=written((*place, name)),
                code="unsupported_parameter",
            )


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object a client sends."""

    counted_fields: ClassVar[tuple[str, ...]] = ()  # that hold prompts, which are counted

    def check(self, place: Place) -> None:
        """Raise ApiError, 400, for what its types do not say.  place: of this object."""
        check_refusals(self, place)


def is_sent(sent: Unserved) -> bool:
    """Whether it holds more than null."""
    return sent is not msgspec.UNSET and bytes(memoryview(sent)[:5]) != b"null"


def _is_one_of(sent: msgspec.Raw, allowed: tuple[object, ...]) -> bool:
    """Equality that tells 1 from True."""
    if len(sent) > _MAX_BYTES:
        return False
    value = msgspec.json.decode(sent)
    return any(type(value) is type(each) and value == each for each in allowed)


def as_sent(sent: msgspec.Raw) -> str:
    """What a client wrote, shortened."""
    return shortened(bytes(memoryview(sent)[:_MAX_BYTES]).decode(errors="replace"))
