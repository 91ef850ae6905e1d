"""PeerMemory: a rank's box on its GPU, and the boxes of the others as this process maps them.

By handles of the CUDA driver (CUDA driver API, "Unified Addressing" and "Memory Management":
cuIpcGetMemHandle, cuIpcOpenMemHandle), which are bytes that any channel carries.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.kernels.all_reduce import RELEASED, Exchange, exchange_memory, peer_table

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _Handle(ctypes.Structure):
    """CUipcMemHandle"""

    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class PeerMemory:
    """Owns one rank's memory and its maps of the others'."""

    def __init__(self, rank: int, ranks: int, *, dtype: torch.dtype) -> None:
        """On the current GPU."""
        self._rank = rank
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._memory = exchange_memory(ranks, 0, dtype=dtype, device=self._device)
        self._aside = torch.cuda.Stream()
        # The kernel of `release` is loaded now: behind one that waits none is.
        self._memory.sent.fill_(0)
        self._opened: list[int] = []

    @property
    def handle(self) -> bytes:
        """For the others' `open`.  Raises ConfigError where the allocator's memory has none."""
        torch.cuda.synchronize()
        return b"".join(map(_share, self._memory))

    def open(self, handles: Sequence[bytes]) -> Exchange:
        """The way to all ranks, once.  handles: [ranks] of each.  Raises ConfigError for a GPU that
        this one cannot reach."""
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self._rank:
                addresses.append(self._memory.addresses)
                continue
            self._require_atomics(rank)
            size = len(handle) // len(self._memory)
            parts = (handle[first : first + size] for first in range(0, len(handle), size))
            addresses.append(tuple(self._map(rank, part) for part in parts))
        peers = peer_table(addresses, self._device)
        return Exchange(self._rank, *self._memory, peers)

    def release(self) -> None:
        """Let this rank's kernels wait for nobody: what they sum from now on is nobody's to read.
        For when a rank has ended; any thread may call it."""
        # A lost context has no kernels.
        with suppress(RuntimeError), torch.cuda.stream(self._aside):
            self._memory.sent.fill_(RELEASED)

    def close(self) -> None:
        """Unmap the others' memory, which their driver keeps until then; what is in flight waits
        for nobody.  Closing twice is harmless."""
        self.release()
        with suppress(RuntimeError):  # a lost context has no maps
            torch.cuda.synchronize(self._device)
            while self._opened:
                _call("cuIpcCloseMemHandle", ctypes.c_uint64(self._opened.pop()))

    def _require_atomics(self, rank: int) -> None:
        """Raise ConfigError where words that `rank` writes could be lost: its writes to a word and
        ours must see each other, which links without atomics of their own do not promise."""
        found, own = ctypes.c_int(), torch.cuda.current_device()
        there = own - self._rank + rank
        _call("cuDeviceGetP2PAttribute", ctypes.byref(found), _NATIVE_ATOMICS, own, there)
        if not found.value:
            raise ConfigError.about(
                "GPUs that share a model",
                expected="linked with native atomics, as by NVLink",
                got=f"GPU {own} and GPU {there}, which have none (`nvidia-smi topo -p2p a`)",
                remedy="leave --tensor-parallel-size out, or choose others by CUDA_VISIBLE_DEVICES",
            )

    def _map(self, rank: int, handle: bytes) -> int:
        """Address of what another rank shared."""
        base = ctypes.c_uint64()
        offset = int.from_bytes(handle[_HANDLE_BYTES:], "little")
        opaque = _Handle.from_buffer_copy(handle[:_HANDLE_BYTES])
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), opaque, _LAZY_PEER_ACCESS)
        self._opened.append(base.value)
        return base.value + offset


def _share(tensor: Tensor) -> bytes:
    """A handle of the allocation that holds it, and its offset there."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    address = ctypes.c_uint64(tensor.data_ptr())
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle) + (tensor.data_ptr() - base.value).to_bytes(8, "little")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise ConfigError.about(
            "memory of GPUs that share a model",
            expected="shared between processes",
            got=f"{(text.value or b'an unknown error').decode()} of {name}",
            remedy="they must reach each other (`nvidia-smi topo -p2p r`), and "
            "PYTORCH_CUDA_ALLOC_CONF must not have expandable_segments",
        )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
