"""What kernels in Gluon ask of the copy engine, by the names that a version of Triton has."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# (tiles, place, barrier, shared memory): the tile at a place comes into shared memory.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def tiles_of(x: Tensor, shape: list[int]) -> Any:
    """x, of 16 bits and contiguous but for its leading strides, in tiles of a shape that lie in
    shared memory as matrix instructions read them."""
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return TensorDescriptor.from_tensor(x, shape, layout)
