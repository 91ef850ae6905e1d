"""Triton's interpreter without its repeated work, which is half of an interpreted kernel's time.

* It replaces the functions of `triton.language` by its own for the time of a launch, and again at
  every call of a function within the kernel (`tl.zeros`, `tl.cdiv`, our own helpers), where they
  are replaced already: it then only looks through every name.  Here they are patched once a launch.
* It does each sum and product of integers again in 64 bits to see whether one overflows, and
  asserts that in debug mode alone, which it is not in.
* It builds its table of numpy's dtypes at every look into it, and the shape of a tensor anew for
  every value of that shape.
* It asks of every two operands what they have in common, though mostly they are alike.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest


def patch_once(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """interpreter: the module `triton.runtime.interpreter`."""
    for owner, name, value in _replaced(interpreter):
        monkeypatch.setattr(owner, name, value)


@cache
def _replaced(interpreter: Any) -> list[tuple[Any, str, Any]]:
    """(owner, name, by what); they know each other's findings for as long as the process lives."""
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    core = interpreter.tl.core
    assert not builder.options.debug
    broadcast = _broadcast(semantic, core)
    return [
        (interpreter, "_patch_lang", _Patcher(interpreter)),
        (interpreter, "_patch_attr", _patch_attr(semantic, core)),
        (interpreter, "_get_np_dtype", _np_dtypes(interpreter._get_np_dtype)),
        (builder, "options", replace(builder.options, sanitize_overflow=False)),
        (core.tensor, "__init__", _init_of_tensor(core)),
        (core.block_type, "__init__", _init_of_block(core.block_type.__init__)),
        (semantic, "broadcast_impl_value", broadcast),
        (semantic, "binary_op_type_checking_impl", _check_operands(semantic, core, broadcast)),
        (semantic, "cast", _cast(semantic.cast)),
        (core, "_unwrap_if_constexpr", _unwrap(core)),
        (interpreter.TensorHandle, "__post_init__", _check_size(interpreter.TensorHandle)),
    ]


def _patch_attr(semantic: Any, core: Any) -> Callable[..., None]:
    """What calls a function of the language without looking whether the interpreter is given."""
    checked = core.builtin(lambda: None).__code__

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        is_checked = getattr(member, "__code__", None) is checked
        function = member.__wrapped__ if is_checked else member

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(owner, name, call)

    return patch_attr


def _broadcast(semantic: Any, core: Any) -> Callable[..., tuple[Any, Any]]:
    """Two tensors of the shape that both take; what that is, is found once of each two shapes."""
    find_anew = semantic.broadcast_impl_value

    @cache
    def common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        """None: they have none, or one of them lacks dimensions."""
        pairs = list(zip(left, right, strict=False))
        fit = len(left) == len(right) and all(1 in pair or pair[0] == pair[1] for pair in pairs)
        return tuple(b if a == 1 else a for a, b in pairs) if fit else None

    def widened(value: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
        if old == new:
            return value
        handle = semantic.builder.create_broadcast(value.handle, new)
        return core.tensor(handle, core.block_type(value.type.scalar, list(new)))

    def splat(value: Any, like: Any) -> Any:
        alike = value.type.name == like.scalar.name
        block = like if alike else core.block_type(value.type, list(like.shape.values))
        return core.tensor(semantic.builder.create_splat(block, value.handle), block)

    def broadcast(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return splat(lhs, right) if right.is_block() else lhs, rhs
        if not right.is_block():
            return lhs, splat(rhs, left)
        if left.shape is right.shape:
            return lhs, rhs
        left, right = tuple(left.shape.values), tuple(right.shape.values)
        shape = common(left, right)
        if shape is None:
            return find_anew(lhs, rhs)
        return widened(lhs, left, shape), widened(rhs, right, shape)

    return broadcast


def _check_operands(semantic: Any, core: Any, broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Operands of one dtype are computed in it: none is cast; numbers become of a tensor's dtype
    where it can say what they are, and offsets of pointers stay as they are."""
    check_anew = semantic.binary_op_type_checking_impl
    kept: dict[str, tuple[bool, tuple[type, ...]]] = {}

    def kept_of(dtype: Any) -> tuple[bool, tuple[type, ...]]:
        """Whether what is computed of two of a dtype is of it, and of what numbers besides."""
        if dtype.name not in kept:
            is_float = dtype.is_fp32() or dtype.is_fp64()
            numbers = (int, float) if is_float else (int,) if dtype.name != "int1" else ()
            is_kept = is_float or dtype.is_int()
            kept[dtype.name] = is_kept, numbers if is_kept else ()
        return kept[dtype.name]

    def check(
        lhs: Any,
        rhs: Any,
        lhs_pointer: bool = False,
        rhs_pointer: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if isinstance(lhs, core.tensor):
            dtype = lhs.dtype
            if isinstance(rhs, core.tensor):
                if dtype.name == rhs.dtype.name and kept_of(dtype)[0]:
                    return broadcast(lhs, rhs)
                if lhs_pointer and dtype.is_ptr() and rhs.dtype.is_int():
                    return broadcast(lhs, rhs)
            elif arithmetic_check and type(rhs) in kept_of(dtype)[1]:
                return broadcast(lhs, semantic._cast_to_computation_type(rhs, dtype))
        return check_anew(lhs, rhs, lhs_pointer, rhs_pointer, arithmetic_check, div_or_mod)

    return check


def _cast(cast_anew: Callable[..., Any]) -> Callable[..., Any]:
    def cast(value: Any, dtype: Any, fp_downcast_rounding: str | None = None) -> Any:
        if value.type.scalar is dtype.scalar:
            return value
        return cast_anew(value, dtype, fp_downcast_rounding)

    return cast


def _unwrap(core: Any) -> Callable[[Any], Any]:
    unwrap_anew = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, int, float, bool, str, type(None)}

    def unwrap(value: Any) -> Any:
        if type(value) in plain:
            return value
        return value.value if type(value) is core.constexpr else unwrap_anew(value)

    return unwrap


def _check_size(handle: Any) -> Callable[[Any], None]:
    """Whether an array's items fit a dtype, once of each two."""
    check_anew = handle.__post_init__
    fit: set[tuple[int, str]] = set()

    def check(self: Any) -> None:
        asked = self.data.itemsize, self.dtype.name
        if asked not in fit:
            check_anew(self)
            fit.add(asked)

    return check


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
    """What `block_type.__init__` does, once for each type of items and each shape, with one object
    for each shape."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element_ty.name, *sizes)
        if key not in found:
            init_anew(block, element_ty, shape)
            block.shape = shapes.setdefault(tuple(sizes), block.shape)
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
