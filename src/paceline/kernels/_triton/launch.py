"""Programmatic dependent launch: a kernel may start while the one before it drains.

Every program of a kernel launched so must call `wait_for_inputs`, before it reads what an earlier
kernel wrote and before it writes anything at all; weights may be read before.  The wait is for the
kernel before this one to end; that one waited too, so all before it have ended, wherever it let
this one start.  A program that ended without waiting would break the chain.

`let_next_start` is called once the kernel has nothing left to load, so that waiting programs do not
take the place of working ones.  (PTX ISA, griddepcontrol; Hopper and later.)
"""

from typing import Any

import torch
import triton
import triton.language as tl

from paceline.kernels._triton.runtime import interpreted

_FIRST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_inputs(OVERLAPPED: tl.constexpr):
    """Wait until the kernels before this one have finished and their writes are visible."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAPPED: tl.constexpr):
    """Allow the next kernel to start once every program of this one has come here or ended."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()


def overlap_options(device: torch.device, kernel: object) -> dict[str, Any]:
    """Launch arguments of a kernel that has the OVERLAPPED constant."""
    if interpreted(kernel) or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"OVERLAPPED": False}
    return {"OVERLAPPED": True, "launch_pdl": True}
