"""Fields that clients send of themselves and that change no answer: taken, not read, and listed in
a header of the answer.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET

from paceline.server.bodies.places import Place, written
from paceline.server.bodies.refusals import Unserved, Wire, fields_noted, is_sent
from paceline.server.errors import ApiError

HEADER = "X-Paceline-Ignored"


class Ignored(NamedTuple):
    """Why a field is not read."""

    why: str


_NO_TEMPLATE = "no chat template reads it"


class FromAnswers(Wire, frozen=True, kw_only=True):
    """What client libraries add to an assistant's message, and send back with it."""

    provider_specific_fields: Annotated[Unserved, Ignored(_NO_TEMPLATE)] = UNSET
    reasoning_items: Annotated[Unserved, Ignored(_NO_TEMPLATE)] = UNSET
    thinking_blocks: Annotated[Unserved, Ignored(_NO_TEMPLATE)] = UNSET

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        role: Any = getattr(self, "role", None)
        own = [name for name in ignored_of(type(self)) if is_sent(getattr(self, name))]
        for name in own if role != "assistant" else ():
            raise ApiError.about(
                name,
                expected="of an assistant's message",
                got=f"one of role {role}",
                remedy="remove it",
                param=written((*place, name)),
                code="unknown_parameter",
            )


@cache
def ignored_of(kind: type[msgspec.Struct]) -> dict[str, Ignored]:
    """The fields of `kind` that are taken and not read, by name."""
    return fields_noted(kind, Ignored)


def ignored_in(sent: object, place: str = "") -> Iterator[str]:
    """Where `sent`, and what lies in it, has such a field that holds something: messages[].name."""
    if isinstance(sent, list):
        for each in sent:
            yield from ignored_in(each, f"{place}[]")
    elif isinstance(sent, msgspec.Struct):
        notes = ignored_of(type(sent))
        for name in sent.__struct_fields__:
            value, here = getattr(sent, name), f"{place}.{name}" if place else name
            if name not in notes:
                yield from ignored_in(value, here)
            elif is_sent(value):
                yield here
