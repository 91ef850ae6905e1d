"""What is wrong with a request body, in one sentence, from pydantic's list of errors."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.core.errors import message

_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "missing": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_type": "a string",
    "string_unicode": "text that UTF-8 can hold",
}
_MAX_SHOWN = 80  # characters of a value in a message


class Fault(NamedTuple):
    """The first thing a client should repair."""

    text: str
    param: str | None
    code: str | None = None


def fault_of(errors: Sequence[Mapping[str, Any]], body: object) -> Fault:
    """The most specific of pydantic's errors about `body`.

    A field of several types gives one error for each; those at the deepest place are the ones of
    the type that was meant, and are told together.
    """
    found = [(_path(error, body), error) for error in errors]
    deepest = max(len(path) for path, _ in found)
    path = next(path for path, _ in found if len(path) == deepest)
    return _told([error for other, error in found if other == path], path)


def _told(errors: Sequence[Mapping[str, Any]], path: tuple[str | int, ...]) -> Fault:
    param, first = _written(path), errors[0]
    kind, got = first["type"], first["input"]
    if kind == "refused":
        field = _written((*path, first["ctx"]["param"]))
        return Fault(first["msg"], field, "unsupported_parameter")
    if kind == "json_invalid":
        where = f"position {first['loc'][-1]}: {first['ctx']['error']}"
        remedy = "repair the JSON"
        return Fault(message("the body", expected="JSON", got=where, remedy=remedy), None)
    if not path:
        remedy = "send a JSON object, with Content-Type: application/json"
        text = message("the body", expected=_wanted(first), got=_short(got), remedy=remedy)
        return Fault(text, None)
    if kind == "missing":
        text = message(param, expected="present", got="nothing", remedy="add it")
        return Fault(text, param, "missing_required_parameter")
    if kind == "extra_forbidden":
        remedy = "remove it; /openapi.json lists the fields of every endpoint"
        text = message(
            param, expected="a field of this endpoint", got="an unknown one", remedy=remedy
        )
        return Fault(text, param, "unknown_parameter")
    wanted = dict.fromkeys(_wanted(error) for error in errors)
    remedy = "types are strict: nothing is converted"
    return Fault(
        message(param, expected=" or ".join(wanted), got=_short(got), remedy=remedy), param
    )


def _wanted(error: Mapping[str, Any]) -> str:
    if error["type"] == "literal_error":
        return f"one of {error['ctx']['expected']}"
    if error["type"] == "too_short":
        return f"a list of at least {error['ctx']['min_length']}"
    limits = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}
    if error["type"] in limits:
        word, key = limits[error["type"]]
        return f"{word} {error['ctx'][key]}"
    told: str = error["msg"]
    return _WANTED.get(error["type"], told)


def _path(error: Mapping[str, Any], body: object) -> tuple[str | int, ...]:
    """Where an error is in the body; without the names of types pydantic puts in between."""
    path: list[str | int] = []
    value = body
    parts = [part for part in error["loc"] if part != "body"]
    for part in parts:
        is_key = isinstance(value, Mapping) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            path.append(part)
            value = value[part]  # type: ignore[index]
    if error["type"] == "missing" and parts:
        path.append(parts[-1])
    return tuple(path)


def _written(path: tuple[str | int, ...]) -> str:
    """messages[0].content"""
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(words).removeprefix(".")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
