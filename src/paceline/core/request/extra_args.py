"""Per-request arguments of logits processors: JSON-like values, frozen so that they can be hashed.

What they mean is their processor's business; here only their form is checked.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import RequestError

ExtraArgs = tuple[tuple[str, Any], ...]  # (name, frozen value), by name
MAX_DEPTH = 32  # lists in one another; a mapping counts twice, as what is frozen of it does


def extra_args(value: object) -> ExtraArgs:
    """A mapping of names to JSON-like values as sorted pairs; pairs are taken as they are.

    Lists become tuples and mappings sorted pairs, at any depth.  Raises RequestError.
    """
    if isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise _error("extra_args", "a mapping from names to JSON values", value)
    return _pairs("extra_args", value, MAX_DEPTH)


def _pairs(where: str, value: Mapping[Any, Any], depth: int) -> ExtraArgs:
    for name in value:
        if not isinstance(name, str) or not name:
            raise _error(f"a key of {where}", "a non-empty str", name)
    return tuple(
        (name, _frozen(f"{where}[{name!r}]", value[name], depth - 1)) for name in sorted(value)
    )


def _frozen(where: str, value: object, depth: int) -> Any:
    """depth: levels that may lie within."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth <= 0:
        raise _error("extra_args", f"at most {MAX_DEPTH} levels deep", "more levels")
    if isinstance(value, Mapping):
        if depth <= 1:
            raise _error("extra_args", f"at most {MAX_DEPTH} levels deep", "more levels")
        return _pairs(where, value, depth - 1)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        items = enumerate(value)
        return tuple(_frozen(f"{where}[{index}]", item, depth - 1) for index, item in items)
    raise _error(where, "a JSON value: null, bool, number, str, list or mapping", value)


def _error(name: str, expected: str, got: object) -> RequestError:
    remedy = "pass what json.loads could return"
    return RequestError.about(name, expected=expected, got=f"{got!r}", remedy=remedy)
