"""Triton's interpreter without its repeated work: the language is patched once a launch.

The interpreter replaces the functions of `triton.language` by its own for the time of a launch, and
again at every call of a function within the kernel (`tl.zeros`, `tl.cdiv`, our own helpers), where
they are replaced already: it then only looks through every name, a third of an interpreted
kernel's time.
"""

from collections.abc import Callable
from typing import Any

import pytest


def patch_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """interpreter: the module `triton.runtime.interpreter`."""
    monkeypatch.setattr(interpreter, "_patch_lang", _Patcher(interpreter))


class _Patcher:
    """Patches what the running launch has not patched yet."""

    def __init__(self, interpreter: Any) -> None:
        self._patch: Callable[[Any], Any] = interpreter._patch_lang
        self._unchanged = interpreter._LangPatchScope  # undoes nothing
        self._modules = (interpreter.tl, interpreter.tl.core)
        self._in_launch: set[str] = set()  # names of modules; a launch undoes them
        self._for_good: set[str] = set()  # no call within a kernel undoes what it patched

    def __call__(self, function: Any) -> Any:
        names = {
            value.__name__
            for value in function.__globals__.values()
            if any(value is module for module in self._modules)
        }
        if self._in_launch and names <= self._in_launch | self._for_good:
            return self._unchanged()
        scope = self._patch(function)
        if self._in_launch:
            self._for_good |= names
            return scope
        self._in_launch |= names
        undo = scope.restore

        def restore() -> None:
            self._in_launch.clear()
            undo()

        scope.restore = restore
        return scope
