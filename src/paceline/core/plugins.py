"""Modules and classes that may not be here: a library's, or those a user names as
`package.module:Class`."""

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import ModuleType
from typing import TypeVar

from paceline.core.errors import ConfigError

T = TypeVar("T")


def can_find(module: str) -> bool:
    """Whether the import system knows the module; its own code is not run."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False  # the package in front of the dot


@cache
def installed_version(package: str) -> str | None:
    """None where it is absent.  Asked once: a process keeps what it has imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def import_modules(what: str, *names: str, remedy: str) -> list[ModuleType]:
    """The modules of a library.

    what: who needs them, as errors call it.  Raises ConfigError with what the import said.
    """
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ConfigError.about(
            what,
            expected=f"an importable {' and '.join(names)}",
            got=f"{type(error).__name__}: {error}",
            remedy=remedy,
        ) from error


def load_class(what: str, target: str, base: type[T]) -> type[T]:
    """The class behind `package.module:Class`, a subclass of `base`.

    what: how errors call it.  Raises ConfigError.
    """
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.about(
            what,
            expected="an importable package.module:Class",
            got=f"{target!r} ({error})",
            remedy="check the spelling and PYTHONPATH",
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError.about(
            what,
            expected=f"a subclass of {base.__name__}",
            got=f"{target!r}, a {type(found).__name__}",
            remedy=f"derive it from {base.__module__}.{base.__name__}",
        )
    return found


def missing_of(found: type, attributes: Mapping[str, type]) -> list[str]:
    """What a class has yet to define before it can be made without arguments: attributes of these
    types, abstract methods, defaults of its constructor."""
    missing = [
        f"{name} of type {kind.__name__}"
        for name, kind in attributes.items()
        if not isinstance(getattr(found, name, None), kind)
    ]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    return missing + [f"default for its constructor's {name}" for name in _arguments_of(found)]


@cache
def _arguments_of(found: type) -> tuple[str, ...]:
    """What a class cannot be made without.  Asked once: `signature` takes longer than all else that
    loads a backend, which a plan does for every backend that might run."""
    given = [p for p in signature(found).parameters.values() if p.default is p.empty]
    return tuple(p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
