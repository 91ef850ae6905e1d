"""A request's body, read into its type and refused at its first fault.

msgspec builds the fields as it reads and stops at the first that is wrong, so what a wrong body
costs does not grow with what follows (decision 034).
"""

from typing import Any, TypeVar

import msgspec
from fastapi import Request

from paceline.server.bodies.counts import Room, counted
from paceline.server.bodies.faults import REMEDY, fault_of, not_json
from paceline.server.bodies.refusals import Wire
from paceline.server.errors import ApiError

LARGE = 1 << 16  # bytes: what a longer body holds is counted before it is built
SMALL = 1 << 10  # bytes: a short prompt is read in less time than another thread takes to begin
W = TypeVar("W", bound=Wire)


async def read_body(request: Request) -> list[bytes]:
    """Its parts as they came.  Raises ApiError, 400 for a body of another kind and 413 for one that
    is too long.
    """
    said = request.headers.get("content-type", "nothing")
    if said.partition(";")[0].strip().lower() != "application/json":
        raise ApiError.about(
            "Content-Type", expected="application/json", got=repr(said), remedy=REMEDY
        )
    return [part async for part in request.stream()]


def decoded(kind: type[W], body: bytes, room: Room) -> W:
    """Raises ApiError, 400, for the first fault."""
    try:
        once = body if len(body) <= LARGE else counted(kind, body, room)
        found = msgspec.json.decode(once, type=kind)
        found.check(())
    except msgspec.ValidationError as error:
        raise fault_of(error, kind, body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from error
    return found


def body_schema(kind: type[Wire]) -> dict[str, Any]:
    """What /openapi.json says of a body of this kind."""
    _, components = msgspec.json.schema_components([kind], ref_template="{name}")
    schema = _inlined(components[kind.__name__], components)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(node: Any, components: dict[str, Any]) -> Any:
    """`node` with what it refers to in place."""
    if isinstance(node, list):
        return [_inlined(each, components) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(components[node["$ref"]], components)
    return {name: _inlined(each, components) for name, each in node.items()}
