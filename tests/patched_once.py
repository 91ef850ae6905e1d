"""Triton's interpreter without its repeated work, which is half of an interpreted kernel's time.

* It replaces the functions of `triton.language` by its own for the time of a launch, and again at
  every call of a function within the kernel (`tl.zeros`, `tl.cdiv`, our own helpers), where they
  are replaced already: it then only looks through every name.  Here they are patched once a launch.
* It does each sum and product of integers again in 64 bits to see whether one overflows, and
  asserts that in debug mode alone, which it is not in.
* It builds its table of numpy's dtypes at every look into it, and the shape of a tensor anew for
  every value of that shape.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest


def patch_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """interpreter: the module `triton.runtime.interpreter`."""
    monkeypatch.setattr(interpreter, "_patch_lang", _Patcher(interpreter))
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    unchecked = replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", unchecked)
    monkeypatch.setattr(interpreter, "_get_np_dtype", _np_dtypes(interpreter._get_np_dtype))
    core = interpreter.tl.core
    monkeypatch.setattr(core.tensor, "__init__", _init_of_tensor(core))
    monkeypatch.setattr(core.block_type, "__init__", _init_of_block(core.block_type.__init__))


def _np_dtypes(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The table of numpy's dtypes by the name of a triton type; a block's is that of its items."""
    found: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    return np_dtype


def _init_of_tensor(core: Any) -> Callable[..., None]:
    """What `tensor.__init__` does, with one object for each shape."""

    @cache
    def of_shape(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape))

    def init(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = of_shape(*(type.shape if type.is_block() else ()))

    return init


def _init_of_block(init_anew: Callable[..., None]) -> Callable[..., None]:
    """What `block_type.__init__` does, once for each type of items and each shape."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element_ty.name, *sizes)
        if key not in found:
            init_anew(block, element_ty, shape)
            found[key] = dict(vars(block))
        vars(block).update(found[key], element_ty=element_ty)

    return init


class _Patcher:
    """Patches what the running launch has not patched yet."""

    def __init__(self, interpreter: Any) -> None:
        self._patch: Callable[[Any], Any] = interpreter._patch_lang
        self._unchanged = interpreter._LangPatchScope  # undoes nothing
        self._modules = (interpreter.tl, interpreter.tl.core)
        self._in_launch: set[str] = set()  # names of modules; a launch undoes them
        self._for_good: set[str] = set()  # no call within a kernel undoes what it patched
        self._names: dict[Any, set[str]] = {}  # function -> those of the language it calls by name

    def __call__(self, function: Any) -> Any:
        names = self._names.get(function)
        if names is None:
            names = self._names[function] = {
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
