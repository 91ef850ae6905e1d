"""Where Triton kernels may run, and how large their tiles may be there."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from paceline.core.errors import KernelArgumentError
from paceline.kernels.stand_in import device_type

_CPU_SHARED_BYTES = 232448  # what the interpreter pretends to have
_UNITS = (torch.int64, torch.int32, torch.int16)  # what bytes are moved in, the widest that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """One kernel's tile sizes and launch options."""

    block_rows: int  # query rows of a tile
    block_keys: int  # keys of a tile
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig(TileConfig):
    """The tiles of a kernel whose programs may share the keys of a request."""

    min_tiles: int  # of keys, that a split is worth its merge


def interpreted(kernel: object) -> bool:
    """Whether this jitted function was defined with Triton's interpreter on."""
    return not isinstance(kernel, JITFunction)


def require_runnable(what: str, tensor: Tensor, kernel: object, *, otherwise: str) -> None:
    """Refuse CPU tensors unless Triton was imported with its interpreter on.

    what: the argument and its op; otherwise: what the caller may do instead.
    """
    if device_type(tensor.device) == "cpu" and not interpreted(kernel):
        raise KernelArgumentError.about(
            what,
            expected="on a CUDA device",
            got="a CPU tensor",
            remedy=f"{otherwise}, or set TRITON_INTERPRET=1 before the first import of triton",
        )


def widest_integers(slots: Tensor) -> Tensor:
    """[layers, slots, width] integers over the bytes of contiguous [layers, slots, ...]."""
    as_bytes = slots.view(*slots.shape[:2], -1).view(torch.uint8)
    fits = (unit for unit in _UNITS if as_bytes.shape[2] % unit.itemsize == 0)
    return as_bytes.view(next(fits, torch.uint8))


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """The most shared memory one program may use."""
    if device.type != "cuda":
        return _CPU_SHARED_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def keys_per_stage(head_dim: int, v_head_dim: int, element_bytes: int) -> int:
    """Keys of one tile, 16..128, such that its K and V together take 32 KiB.

    Half of that for float32, whose products run on scalar units out of registers.
    """
    row_bytes = (block_dim(head_dim) + block_dim(v_head_dim)) * element_bytes
    tile_bytes = 16384 if element_bytes == 4 else 32768
    return max(16, min(128, tile_bytes // next_power_of_2(row_bytes)))


def floor_power_of_2(n: int) -> int:
    """The largest that is not above n; of less than 1 it is 1."""
    return 1 << max(n, 1).bit_length() - 1


def next_power_of_2(n: int) -> int:
    """The least that is not below n; on the host Triton's own costs more than torch's operators."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up; on the host as above."""
    return -(-n // size)


def block_dim(dim: int) -> int:
    """A head dim as a tile edge: a power of two that a matrix unit can take."""
    return max(16, next_power_of_2(dim))
