"""What is wrong with a request body, in one sentence, from the first error of msgspec."""

import re

import msgspec
from msgspec import inspect

from paceline.server.bodies.places import ANY_KEY, Place, find, shortened, written
from paceline.server.errors import ApiError

REMEDY = "send a JSON object in UTF-8, with Content-Type: application/json"
_MAX_TOLD = 500  # characters; no place that msgspec writes is longer
_WANTED = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}
_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?", re.DOTALL)
_PART = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[\.\.\.\]")
_FIELD = re.compile(r"Object (?P<how>missing required|contains unknown) field `(?P<name>.*)`", re.S)
_TYPE = re.compile(r"Expected `(?P<types>[^`]*)`, got `[^`]*`")
_BOUND = re.compile(r"Expected `(?P<type>\w+)`(?P<is_length> of length)? (?P<sign>[<>]=) (?P<n>.*)")


def not_json(error: Exception) -> ApiError:
    """A body that cannot be read."""
    got = "more levels than can be read" if isinstance(error, RecursionError) else str(error)
    return ApiError.about("the body", expected="JSON", got=got, remedy=REMEDY)


def fault_of(error: msgspec.ValidationError, kind: type[msgspec.Struct], body: bytes) -> ApiError:
    """Of a body that is JSON and no `kind`."""
    told = _ERROR.fullmatch(_cut(str(error)))
    assert told is not None, error
    what, place = told["what"], _place(told["path"] or "")
    field = _FIELD.fullmatch(what)
    if field is not None:
        return _of_name(field["how"], written((*place, field["name"])))
    if not place:
        found = find(body, place, _is_no_text)
        got = "none" if found is None else found.text
        return ApiError.about("the body", expected="an object", got=got, remedy=REMEDY)
    return _of_value(_expected(what, kind, place), place, body)


def _cut(told: str) -> str:
    """Without the middle of a name that a client made long; the place stands at the end."""
    return told if len(told) <= 2 * _MAX_TOLD else told[:_MAX_TOLD] + told[-_MAX_TOLD:]


def _of_name(how: str, param: str) -> ApiError:
    if how == "missing required":
        return ApiError.about(
            param,
            expected="present",
            got="nothing",
            remedy="add it",
            param=param,
            code="missing_required_parameter",
        )
    remedy = "remove it; /openapi.json lists the fields of every endpoint"
    param = shortened(param)
    return ApiError.about(
        param,
        expected="a field of this endpoint",
        got="an unknown one",
        remedy=remedy,
        param=param,
        code="unknown_parameter",
    )


def _of_value(expected: str, place: Place, body: bytes) -> ApiError:
    found = find(body, place, _is_no_number if expected == "a number" else _is_no_text)
    place, got = (place, "another value") if found is None else found
    param = shortened(written(tuple(part for part in place if part != ANY_KEY)))
    name = f"a value of {param}" if ANY_KEY in place else param
    remedy = "types are strict: nothing is converted"
    return ApiError.about(name, expected=expected, got=got, remedy=remedy, param=param)


def _expected(what: str, kind: type[msgspec.Struct], place: Place) -> str:
    types, bound = _TYPE.fullmatch(what), _BOUND.fullmatch(what)
    if types is not None:
        names = [name for name in types["types"].split(" | ") if name != "null"]
        return " or ".join(_WANTED[name] for name in names)
    if bound is not None:
        word = {">=": "at least", "<=": "at most"}[bound["sign"]]
        return f"{_WANTED[bound['type']]} of {word} {bound['n']}"
    if what.startswith("Invalid enum value"):
        *some, last = [repr(value) for value in _choices(kind, place)]
        return "one of " + " or ".join([", ".join(some), last] if some else [last])
    return f"in bounds ({what})"


def _choices(kind: type[msgspec.Struct], place: Place) -> tuple[object, ...]:
    """The values a field may have that is one of a few."""
    found: inspect.Type = inspect.type_info(kind)
    for part in place:
        options = found.types if isinstance(found, inspect.UnionType) else (found,)
        for option in options:
            if isinstance(part, int) and isinstance(option, inspect.ListType):
                found = option.item_type
            elif isinstance(option, inspect.StructType):
                found = next(field.type for field in option.fields if field.name == part)
    options = found.types if isinstance(found, inspect.UnionType) else (found,)
    return next(option.values for option in options if isinstance(option, inspect.LiteralType))


def _place(path: str) -> Place:
    return tuple(
        part[1] or (ANY_KEY if part[2] is None else int(part[2])) for part in _PART.finditer(path)
    )


def _is_no_number(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int | float)


def _is_no_text(value: object) -> bool:
    return not isinstance(value, str)
