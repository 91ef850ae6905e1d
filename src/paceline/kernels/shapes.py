"""What torch's operators return, by shape and dtype, so that nothing need be computed.

torch has an answer of its own, the meta device, but the first question imports sympy and the
compiler: 4.8 s of CPU time (torch 2.13), more than an engine takes to start.  These are the
operators that our steps are made of; of any other torch is asked.  A test compares the two.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cmp_to_key, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Rule = Callable[..., Any]


def result_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Meta tensors as `func` returns them; NotImplemented where no rule says."""
    rule = _rule_of(func)
    if rule is None or not _is_meta((*args, *kwargs.values())):
        return NotImplemented
    return rule(*args, **kwargs)


@cache
def _rule_of(func: Any) -> Rule | None:
    name = func._schema.name.removeprefix("aten::")
    if name in _RULES:
        return _RULES[name]
    if torch.Tag.pointwise in func.tags or name in _POINTWISE:
        return partial(_pointwise, func)
    return None


def _is_meta(given: Any) -> bool:
    """Whether an operator's tensors are of the meta device, or it makes one there."""
    if isinstance(given, Tensor):
        return given.is_meta
    if isinstance(given, (list, tuple)):
        return any(map(_is_meta, given))
    return isinstance(given, torch.device) and given.type == "meta"


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The shapes broadcast, laid out as operands are; the dtype is what single elements on a CPU
    make."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    shape = _broadcast(*(each.shape for each in tensors))
    named = {name: _kind(value) for name, value in kwargs.items()}
    return _laid_out(shape, _dtype_made(func, *map(_kind, args), **named), tensors)


# A rehearsal asks of the same few shapes for each of its layers.
_broadcast = lru_cache(maxsize=1024)(np.broadcast_shapes)


def _laid_out(shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
    """As operands are."""
    if all(map(_lies_in_order, tensors)):
        return _meta(shape, dtype)
    order = _outermost_first(len(shape), tensors)
    return _meta([shape[dim] for dim in order], dtype).permute(*map(order.index, range(len(shape))))


def _lies_in_order(x: Tensor) -> bool:
    """Whether no later dimension has longer steps than one before it."""
    if x.is_contiguous():
        return True
    steps = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1 and step]
    return all(before >= step for before, step in pairwise(steps))


def _outermost_first(dims: int, tensors: Sequence[Tensor]) -> list[int]:
    """The dimensions of an elementwise result in memory: of any two, as in the first operand that
    has both."""

    def compare(a: int, b: int) -> int:
        for x in tensors:
            of_a, of_b = (_step(x, dim - dims) for dim in (a, b))
            if of_a and of_b and of_a != of_b:
                return of_b - of_a
        return a - b

    return sorted(range(dims), key=cmp_to_key(compare))


def _step(x: Tensor, dim: int) -> int:
    """Along a dimension counted from the last; 0: it is broadcast."""
    return x.stride(dim) if x.dim() >= -dim and x.shape[dim] > 1 else 0


class _Kind(NamedTuple):
    """What of a tensor decides the dtype of a result."""

    dtype: torch.dtype
    dims: int


def _kind(value: Any) -> Any:
    return _Kind(value.dtype, value.dim()) if isinstance(value, Tensor) else value


@lru_cache(maxsize=1024, typed=True)  # typed: 1 and 1.0 make other dtypes
def _dtype_made(func: Any, *args: Any, **kwargs: Any) -> torch.dtype:
    """By single elements.  args, kwargs: those of `func`, with a `_Kind` for each tensor."""
    named = {name: _single(value) for name, value in kwargs.items()}
    made: torch.dtype = func(*map(_single, args), **named).dtype
    return made


def _single(value: Any) -> Any:
    return torch.ones((1,) * value.dims, dtype=value.dtype) if isinstance(value, _Kind) else value


def _replaced(shape: Sequence[int], dim: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = size
    return sizes


def _reduction(dtype_of: Callable[[torch.dtype], torch.dtype]) -> Rule:
    """The rule of an operator that leaves one element of each dimension it names, or none."""

    def reduced(
        x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        named = range(x.dim()) if dims is None or dims == [] else dims
        gone = {dim % x.dim() for dim in ([named] if isinstance(named, int) else named)}
        left = [(dim, size) for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
        shape = [1 if dim in gone else size for dim, size in left]
        return _meta(shape, dtype or dtype_of(x.dtype))

    return reduced


def _counted(dtype: torch.dtype) -> torch.dtype:
    """Of a sum."""
    return dtype if dtype.is_floating_point else torch.int64


def _like(
    x: Tensor,
    *_: Any,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **__: Any,
) -> Tensor:
    keeps = memory_format in (None, torch.preserve_format)
    return _laid_out(x.shape, dtype or x.dtype, [x] if keeps else [])


def _to(x: Tensor, dtype: Any, _: bool = False, copy: bool = False, **__: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        return NotImplemented
    return x if x.dtype is dtype and not copy else _meta(x.shape, dtype)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | bool | None = None) -> Tensor:
    """dtype: of the result; or whether that is float32, for operators behind autograd's."""
    if isinstance(dtype, bool):
        dtype = torch.float32 if dtype else None
    return _meta(x.shape, dtype or x.dtype)


def _topk(x: Tensor, k: int, dim: int = -1, *_: bool) -> tuple[Tensor, Tensor]:
    shape = _replaced(x.shape, dim, k)
    return _meta(shape, x.dtype), _meta(shape, torch.int64)


def _arange(*bounds: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if not all(isinstance(bound, int) for bound in bounds):
        return NotImplemented
    return _meta([len(range(*bounds))], dtype or torch.int64)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    if any(each.dtype != first.dtype or each.dim() != first.dim() for each in tensors):
        return NotImplemented
    return _meta(_replaced(first.shape, dim, sum(each.shape[dim] for each in tensors)), first.dtype)


def _full(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _meta(size, dtype or torch.get_default_dtype())


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    return _meta(shape, tensors[0].dtype)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    given = [each for each in indices if each is not None and each.dtype is not torch.bool]
    if len(given) < len(indices):
        return NotImplemented
    rows = _broadcast(*(each.shape for each in given))
    return _meta([*rows, *x.shape[len(given) :]], x.dtype)


def _pad(x: Tensor, pads: Sequence[int], *_: Any) -> Tensor:
    shape = list(x.shape)
    for index in range(len(pads) // 2):
        shape[-1 - index] += pads[2 * index] + pads[2 * index + 1]
    return _meta(shape, x.dtype)


def _repeated(x: Tensor, repeats: int, dim: int | None = None, **_: Any) -> Any:
    if isinstance(repeats, Tensor):
        return NotImplemented
    shape = (
        [x.numel() * repeats] if dim is None else _replaced(x.shape, dim, x.shape[dim] * repeats)
    )
    return _meta(shape, x.dtype)


def _tiled(x: Tensor, repeats: Sequence[int]) -> Tensor:
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    return _meta([size * count for size, count in zip(shape, repeats, strict=True)], x.dtype)


def _layer_norm(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return _meta(x.shape, x.dtype)


def _native_layer_norm(x: Tensor, dims: Sequence[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """With means and reciprocal deviations of rows, in the dtype they are computed in."""
    rows = [*x.shape[: x.dim() - len(dims)], *(1 for _ in dims)]
    dtype = torch.promote_types(x.dtype, torch.float32)
    return _layer_norm(x), _meta(rows, dtype), _meta(rows, dtype)


def _matmul(a: Tensor, b: Tensor) -> Any:
    if min(a.dim(), b.dim()) < 2:
        return NotImplemented
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    return _meta([*batch, a.shape[-2], b.shape[-1]], a.dtype)


def _solve_triangular(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    """Columns lie one behind the other."""
    *batch, rows, columns = b.shape
    return _meta([*np.broadcast_shapes(a.shape[:-2], batch), columns, rows], b.dtype).mT


def _places(_: Tensor, values: Any, *, out_int32: bool = False, **__: Any) -> Any:
    """Where values would stand in a sorted tensor."""
    if not isinstance(values, Tensor):
        return NotImplemented
    return _meta(values.shape, torch.int32 if out_int32 else torch.int64)


# Broadcast as the tagged ones do, without the tag.
_POINTWISE = frozenset({"__and__", "__or__", "floor_divide", "where"})
_RULES: Mapping[str, Rule] = {
    "linear": lambda x, w, *_: _meta([*x.shape[:-1], len(w)], x.dtype),
    "mm": lambda a, b: _meta([a.shape[0], b.shape[1]], a.dtype),
    "addmm": lambda _, a, b, **__: _meta([a.shape[0], b.shape[1]], a.dtype),
    "bmm": lambda a, b: _meta([*a.shape[:2], b.shape[2]], a.dtype),
    "matmul": _matmul,
    "linalg_solve_triangular": _solve_triangular,
    "index_copy": _like,
    "index_select": lambda x, dim, rows: _meta(_replaced(x.shape, dim, rows.numel()), x.dtype),
    "gather": lambda x, _, indices, **__: _meta(indices.shape, x.dtype),
    "index": _index,
    "topk": _topk,
    "searchsorted": _places,
    "scatter": _like,
    "sort": lambda x, *_, **__: (_like(x), _meta(x.shape, torch.int64)),
    "log_softmax": _softmax,
    "softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax": _softmax,
    "layer_norm": _layer_norm,
    "native_layer_norm": _native_layer_norm,
    "cumsum": lambda x, _, dtype=None: _meta(x.shape, dtype or _counted(x.dtype)),
    "clone": _like,
    "to": _to,
    "_to_copy": _like,
    "roll": _like,
    "zeros": _full,
    "ones": _full,
    "new_empty": lambda x, size, dtype=None, **_: _meta(size, dtype or x.dtype),
    "new_zeros": lambda x, size, dtype=None, **_: _meta(size, dtype or x.dtype),
    "empty_like": _like,
    "zeros_like": _like,
    "ones_like": _like,
    "full_like": _like,
    "scalar_tensor": lambda _, dtype, **__: _meta((), dtype),
    "arange": _arange,
    "cat": _cat,
    "stack": _stack,
    "sum": _reduction(_counted),
    "any": _reduction(lambda _: torch.bool),
    "amax": _reduction(lambda dtype: dtype),
    "amin": _reduction(lambda dtype: dtype),
    "argmax": _reduction(lambda _: torch.int64),
    "repeat": _tiled,
    "repeat_interleave": _repeated,
    "_unsafe_view": lambda x, size: x.view(size),
    "pad": _pad,
    "constant_pad_nd": _pad,
}
