"""compile_ahead: compile what functions launch, many kernels at once, and launch none of it.

A kernel takes 0.1 to 1.2 s to compile, nearly all of it outside Python, and steps of an 8B model on
an H200 need about 40 variants of them: one after another they would stop whoever is served.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from paceline.kernels.custom_op import DispatchMode

_MOST_THREADS = 16
# Contents undefined until written.
EMPTY_FACTORIES = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
)


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Within the block our Triton kernels are compiled, a thread for each CPU, and not launched.

    Torch's own operators run; new tensors hold zeros, so that what a kernel would have written is a
    valid index.  What a function writes is as undefined as before it ran.  Behind the block every
    kernel is compiled and loaded.  Raises what a compiler raises.
    """
    from triton import AsyncCompileMode

    from paceline.kernels._triton.launch import compile_only

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with _Loaders(threads, device) as pool, AsyncCompileMode(pool), compile_only(), _Zeroed():
        yield


class _Loaders(ThreadPoolExecutor):
    """Threads that compile a kernel and load it onto the device."""

    def __init__(self, threads: int, device: torch.device) -> None:
        super().__init__(threads, initializer=lambda: torch.cuda.set_device(device))

    def submit(self, compile: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """As AsyncCompileMode calls it, with a function without arguments."""
        return super().submit(_load, compile)


def _load(compile: Callable[[], Any]) -> Any:
    kernel = compile()
    _ = kernel.run  # builds the launcher and loads the binary
    return kernel


class _Zeroed(DispatchMode):
    """Fills new tensors with zeros."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func._schema.name in EMPTY_FACTORIES else result
