"""How our Triton kernels are launched, or only compiled.

Programmatic dependent launch: a kernel may start while the one before it drains.

Every program of a kernel launched so must call `wait_for_inputs`, before it reads what an earlier
kernel wrote and before it writes anything at all; weights may be read before.  The wait is for the
kernel before this one to end; that one waited too, so all before it have ended, wherever it let
this one start.  A program that ended without waiting would break the chain.

Three kernels load states before they wait: `state_rows` and `commit_states`, before which
`state_inputs` stands, and `state_step`, before which a projection does.  `state_inputs` waits
before it lets the next start: whatever wrote states and slots before it has ended, and nothing
behind it writes those that they read.  All that stands before a `state_step` in its step may let
the next start at once, but for what stands before all layers: the embedding, which torch launches
behind all that was launched before.  So what wrote states and slots in other steps has ended, and
in its own nothing else writes those of its layer.  A drafter, whose embedding may be a kernel of
ours, keeps none: `_require_attention` in draft_cache.py.

`paged_decode` loads lengths and page ids, and `rope_write_kv` positions, before they wait.  What
writes those stands before a step's embedding, or before the tokens that a drafter's pass copies,
which torch launches likewise; no layer writes them.

`paged_extend` may be two launches of one call, for other requests each.  The second waits where it
ends, not where it starts: the first lets it start behind its own wait, so all that both read is
there, and neither reads what the other writes.

`let_next_start` is called once the kernel has nothing left to load, so that waiting programs do not
take the place of working ones; where programs are few or short, before they wait, so that weights
behind them are asked for meanwhile.  (PTX ISA, griddepcontrol; Hopper and later.)
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from paceline.kernels._triton.runtime import interpreted

_FIRST_CAPABILITY = (9, 0)
_ALIGNMENT = 16  # bytes, of a pointer: Triton compiles for it
_ALIGNED = tl.constexpr(_ALIGNMENT)
# Launches that `compile_only` has seen; None: outside of it.
_SEEN: ContextVar[set[Hashable] | None] = ContextVar("_SEEN", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a jitted kernel on the current stream; within `compile_only` compile it instead."""
    seen = _SEEN.get()
    if seen is None or interpreted(kernel):
        kernel[grid](*args, **options)
        return
    # Layers repeat launches, and Triton takes half a millisecond to find out which.
    key = (kernel, tuple(map(_specialised, args)), tuple(options.items()))
    if key not in seen:
        seen.add(key)
        kernel.warmup(*args, grid=grid, **options)


def _specialised(argument: Any) -> Hashable:
    """All of a launch's argument that a compiled kernel may depend on, and more."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT
    if hasattr(argument, "block_shape"):  # a descriptor of Triton's, or of Gluon's
        return argument.base.dtype, tuple(argument.block_shape)
    assert isinstance(argument, Hashable), argument
    return argument


@contextmanager
def compile_only() -> Iterator[None]:
    """Within the block `launch` starts nothing: outputs keep what they hold."""
    token = _SEEN.set(set())
    try:
        yield
    finally:
        _SEEN.reset(token)


@triton.jit
def wait_for_inputs(OVERLAPPED: tl.constexpr):
    """Wait until the kernels before this one have finished and their writes are visible."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_within(
    place,  # int32  a number of a loop's round
    OVERLAPPED: tl.constexpr,
):
    """0, once it has waited as `wait_for_inputs` does: to be added to the address of all that is
    read behind.

    For a loop of which loads are to be on their way before it waits.  One with an effect would not
    be pipelined, so to the compiler this has none: its order is that of its numbers.
    """
    behind = place
    if OVERLAPPED:
        behind = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;",
            "=r,r",
            [place],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.multiple_of(behind - place, _ALIGNED)


@triton.jit
def let_next_start(OVERLAPPED: tl.constexpr):
    """Allow the next kernel to start once every program of this one has come here or ended."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()


def overlap_options(device: torch.device, kernel: object) -> dict[str, Any]:
    """Launch arguments of a kernel that has the OVERLAPPED constant."""
    if interpreted(kernel) or not _overlaps(device):
        return {"OVERLAPPED": False}
    return {"OVERLAPPED": True, "launch_pdl": True}


@cache
def _overlaps(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
