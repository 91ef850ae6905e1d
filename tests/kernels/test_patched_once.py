"""Interpreted kernels compute what Triton's own interpreter computes, whose repeated work the tests
leave out."""

from functools import partial
from importlib import import_module
from itertools import product

import numpy as np
import pytest
import triton.language as tl

from patched_once import patch_once

NAMES = ("int1", "int8", "uint8", "int32", "uint32", "int64")
NAMES += ("float16", "bfloat16", "float32", "float64", "float8e5")
DTYPES = [getattr(tl, name) for name in NAMES] + [tl.pointer_type(tl.float32)]
SHAPES = [None, (1,), (4,), (1, 4), (2, 1), (2, 4), (8,)]  # None: a scalar
NUMBERS = [0, 1, -1, 300, 1 << 40, 0.5, -0.0, float("inf"), True, None]
# pointers on either side, arithmetic, division: as additions, comparisons, bits and quotients ask
FLAGS = [(True, True, True, False), (False, False, True, True), (False, False, False, False)]


@pytest.fixture
def interpreter(monkeypatch):
    """As Triton brings it.  Not imported before: that it is there says how kernels run."""
    monkeypatch.undo()
    return import_module("triton.runtime.interpreter")


def tensor(interpreter, dtype, shape):
    items = np.arange(np.prod(shape or (1,), dtype=int)) % 2
    held = np.uint64 if dtype.is_ptr() else interpreter._get_np_dtype(dtype)
    handle = interpreter.TensorHandle(items.astype(held).reshape(shape or (1,)), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def told(value):
    return str(value.type), value.handle.dtype, value.handle.data.dtype, value.handle.data.tolist()


def outcomes(interpreter):
    """What becomes of every two operands; of those that do not go together the fault."""
    of, found = partial(tensor, interpreter), []
    shapes = (None, (4,)), ((4,), (4,))
    operands = [(of(a, s), of(b, t)) for a, b, (s, t) in product(DTYPES, DTYPES, shapes)]
    operands += [(of(tl.int32, s), of(tl.int64, t)) for s, t in product(SHAPES, SHAPES)]
    operands += [(of(tl.int32, s), of(tl.int32, t)) for s, t in product(SHAPES, SHAPES)]
    operands += [(of(a, (4,)), number) for a, number in product(DTYPES, NUMBERS)]
    operands += [(number, of(a, None)) for a, number in product(DTYPES, NUMBERS)]
    for (lhs, rhs), flags in product(operands, FLAGS):
        try:
            both = interpreter.interpreter_semantic.binary_op_type_checking_impl(lhs, rhs, *flags)
        except Exception as error:  # noqa: BLE001
            found.append((type(error), str(error)))
        else:
            found.append(tuple(map(told, both)))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an infinite number of a narrow dtype
def test_operands_become_what_the_interpreter_makes_of_them(interpreter, monkeypatch):
    theirs = outcomes(interpreter)
    patch_once(monkeypatch, interpreter)
    assert len(theirs) > 1500
    assert sum(isinstance(each[0], type) for each in theirs) > 100
    assert outcomes(interpreter) == theirs


def test_a_constant_is_its_value_and_what_is_none_stays(interpreter, monkeypatch):
    values = [tl.constexpr(3), 3, 2.5, None, [tl.constexpr(1), 2], (tl.constexpr(True),), tl.int32]
    theirs = [tl.core._unwrap_if_constexpr(value) for value in values]
    patch_once(monkeypatch, interpreter)
    ours = [tl.core._unwrap_if_constexpr(value) for value in values]
    assert ours == theirs
    assert [*map(type, ours)] == [*map(type, theirs)]


def test_items_that_exceed_a_dtype_are_refused(interpreter, monkeypatch):
    patch_once(monkeypatch, interpreter)
    for _ in range(2):
        with pytest.raises(ValueError, match="exceeds dtype primitive_bitwidth"):
            interpreter.TensorHandle(np.zeros(1, dtype=np.int64), tl.int32)
