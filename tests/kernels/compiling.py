"""A plugin of pytest, for `make compile`: every launch of the tests here is compiled for a GPU of
compute capability 9.0, which need not be here, and not made.

Nothing is computed, so what a test compares says nothing: it fails where a compiler refuses a
kernel.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it is unset, without a warning

from collections.abc import Generator
from typing import Any

import pytest
from absent_gpu import pretend

_refused: list[Exception] = []  # by the compiler, in this test


def pytest_configure() -> None:
    """Compile, for tensors of the CPU, what a GPU would run."""
    pretend(90)
    from triton.runtime.jit import JITFunction

    from paceline.kernels._triton import runtime

    warmup = JITFunction.warmup

    def compiled(kernel: Any, *args: Any, **options: Any) -> Any:
        try:
            return warmup(kernel, *args, **options)
        except Exception as error:
            _refused.append(error)
            raise

    JITFunction.warmup = compiled
    runtime.device_type = lambda device: "cuda"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Launch nothing, in fixtures neither."""
    from paceline.kernels._triton.launch import compile_only

    _refused.clear()
    with compile_only():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Pass where no kernel was refused."""
    try:
        yield
    except Exception as error:
        for refused in _refused:
            raise refused from error
    return True
