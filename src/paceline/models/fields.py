"""Typed reading of a config.json: every wrong or missing field becomes one clear ModelError."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from paceline.core.errors import ModelError, message

REQUIRED: Any = object()


class Fields:
    """A view of one JSON object.  JSON null counts as absent."""

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "config.json",
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._given = data
        self._defaults = defaults or {}
        self._data = {**self._defaults, **data}
        self._where = where

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self._data.get(name)

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1) -> Any:
        """An integer of at least `minimum`, or the default."""
        expected = f"an integer of at least {minimum}"
        value = self._value(name, default, expected)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.fail(name, expected, value)
        return value

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A finite positive number, or the default."""
        value = self._value(name, default, "a positive number")
        if value is default:
            return default
        if not _is_positive(value):
            self.fail(name, "a positive number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false, or the default."""
        value = self._value(name, default, "true or false")
        if not isinstance(value, bool):
            self.fail(name, "true or false", value)
        return value

    def choice(self, name: str, known: tuple[str, ...], default: Any = REQUIRED) -> str:
        """One of the known words, or the default."""
        expected = f"one of {', '.join(known)}"
        value = self._value(name, default, expected)
        if value not in known:
            self.fail(name, expected, value)
        return str(value)

    def nested(self, name: str) -> dict[str, Any]:
        """A JSON object; absent means empty."""
        value = self._value(name, {}, "an object")
        if not isinstance(value, dict):
            self.fail(name, "an object", value)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite positive numbers."""
        expected = "a list of positive numbers"
        values = self._value(name, REQUIRED, expected)
        if not isinstance(values, list) or not all(map(_is_positive, values)):
            self.fail(name, expected, values)
        return tuple(map(float, values))

    def defaulting(self, defaults: Mapping[str, Any]) -> "Fields":
        """A view in which absent fields have these values."""
        absent = {name for name in defaults if self._given.get(name) is None}
        given = {name: value for name, value in self._given.items() if name not in absent}
        return Fields(given, self._where, defaults={**self._defaults, **defaults})

    def behind(self, defaults: Mapping[str, Any]) -> "Fields":
        """A view in which fields that the file leaves out have these values; null stays null."""
        return Fields(self._given, self._where, defaults={**self._defaults, **defaults})

    def without(self, name: str) -> "Fields":
        """A view in which a field is absent."""
        given, defaults = dict(self._given), dict(self._defaults)
        given.pop(name, None)
        defaults.pop(name, None)
        return Fields(given, self._where, defaults=defaults)

    def refuse(self, name: str, reason: str) -> None:
        """Raise ModelError when an unsupported feature is switched on."""
        if self._data.get(name):
            self.fail(name, "absent", self._data[name], remedy=reason)

    def fail(
        self, name: str, expected: str, value: Any, *, remedy: str = "check the model's config.json"
    ) -> NoReturn:
        """Raise ModelError about one field."""
        got = "nothing" if value is None else repr(value)
        if name not in self._given and name in self._defaults:
            got += ", which this model_type takes where the file is silent"
        text = message(f"{self._where}: {name}", expected=expected, got=got, remedy=remedy)
        raise ModelError(text)

    def _value(self, name: str, default: Any, expected: str) -> Any:
        value = self._data.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            self.fail(name, expected, None)
        return default


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value > 0
