"""Fields that clients send of themselves and that change no answer: taken, not read, and listed in
a header of the answer.
"""

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import UNSET

from paceline.server.errors import ApiError
from paceline.server.places import Place, written
from paceline.server.refusals import Unserved, Wire

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
        for name in sent_and_ignored([self]) if role != "assistant" else ():
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
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: note
        for name in kind.__struct_fields__
        for note in getattr(hints[name], "__metadata__", ())
        if isinstance(note, Ignored)
    }


def sent_and_ignored(items: Iterable[msgspec.Struct]) -> set[str]:
    """The names of such fields that hold something."""
    return {
        name
        for item in items
        for name in ignored_of(type(item))
        if getattr(item, name) is not msgspec.UNSET
        and bytes(memoryview(getattr(item, name))[:5]) != b"null"
    }
