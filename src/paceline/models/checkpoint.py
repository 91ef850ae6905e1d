"""The safetensors files of a folder as one lazily read set of named tensors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import WeightsError
from paceline.core.lfs import LFS_POINTER, LFS_REMEDY, is_lfs_pointer
from paceline.models.weight_files import weight_files

SPELLED = {  # as safetensors files spell them
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_TABLES = ("embed_tokens.weight", "lm_head.weight")


class StoredTensors(Protocol):
    """Named tensors of any file format."""

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; reads no data."""

    def dtype(self, name: str) -> str:
        """As safetensors files spell it: "BF16", "F32", ..."""

    def tensor(self, name: str) -> Tensor:
        """On the CPU, pages of the file until it is copied."""


class Checkpoint:
    """Names, shapes and, one at a time, contents.  Tensors are views of the mapped files."""

    def __init__(self, shards: dict[str, Any]) -> None:
        """`shards`: open files by name.  Raises WeightsError for a tensor that two of them hold."""
        self._shard_of: dict[str, Any] = {}
        holder: dict[str, str] = {}
        for file, shard in shards.items():
            for name in shard.keys():  # noqa: SIM118 - a shard has keys and is no mapping
                if name in holder:
                    raise _duplicate(name, holder[name], file)
                holder[name] = file
                self._shard_of[name] = shard

    @property
    def names(self) -> list[str]:
        """Every tensor's name, shard by shard."""
        return list(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header; reads no data."""
        return tuple(self._shard_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As the file spells it: "BF16", "F32", ..."""
        return str(self._shard_of[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """On the CPU, pages of the file until it is copied."""
        tensor: Tensor = self._shard_of[name].get_tensor(name)
        return tensor


class PaddedTables:
    """A checkpoint whose tables of `stored` rows are seen with `rows`; the rest as it is.

    Models of one family pad their vocabulary differently (Qwen 2.5: 151,936 rows at 0.5B, 152,064
    at 7B).  Rows that no token of the shared tokenizer has are cut off, or copies of the last row:
    such an id is hardly ever proposed, and the target decides.
    """

    def __init__(self, checkpoint: StoredTensors, *, stored: int, rows: int) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._rows = rows

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return self._checkpoint.names

    def shape(self, name: str) -> tuple[int, ...]:
        """As the model has it; reads no data."""
        shape = self._checkpoint.shape(name)
        return (self._rows, *shape[1:]) if self._is_table(name) else shape

    def dtype(self, name: str) -> str:
        """As the file spells it: "BF16", "F32", ..."""
        return self._checkpoint.dtype(name)

    def tensor(self, name: str) -> Tensor:
        """On the CPU."""
        tensor = self._checkpoint.tensor(name)
        if not self._is_table(name):
            return tensor
        missing = self._rows - self._stored
        if missing <= 0:
            return tensor[: self._rows]
        return torch.cat((tensor, tensor[-1:].expand(missing, -1)))

    def _is_table(self, name: str) -> bool:
        shape = self._checkpoint.shape(name)
        return name.endswith(_TABLES) and len(shape) == 2 and shape[0] == self._stored


class WithModules:
    """A checkpoint, and those of modules in folders below it, whose names begin with the folder's:
    2_Dense.linear.weight."""

    def __init__(self, checkpoint: StoredTensors, modules: Mapping[str, StoredTensors]) -> None:
        self._of = {name: (checkpoint, name) for name in checkpoint.names}
        for folder, module in modules.items():
            self._of |= {f"{folder}.{name}": (module, name) for name in module.names}

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Reads no data."""
        stored, own = self._of[name]
        return stored.shape(own)

    def dtype(self, name: str) -> str:
        """As the file spells it: "BF16", "F32", ..."""
        stored, own = self._of[name]
        return stored.dtype(own)

    def tensor(self, name: str) -> Tensor:
        """On the CPU."""
        stored, own = self._of[name]
        return stored.tensor(own)


class ZerosBehind:
    """A checkpoint with tensors of zeros behind its own, for those that its architecture leaves
    out: Whisper's keys have no bias."""

    def __init__(self, checkpoint: StoredTensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return [*self._checkpoint.names, *self._shapes]

    def shape(self, name: str) -> tuple[int, ...]:
        """Reads no data."""
        return self._shapes[name] if name in self._shapes else self._checkpoint.shape(name)

    def dtype(self, name: str) -> str:
        """Of zeros float32: they are cast to any float."""
        return SPELLED[torch.float32] if name in self._shapes else self._checkpoint.dtype(name)

    def tensor(self, name: str) -> Tensor:
        """On the CPU."""
        if name in self._shapes:
            return torch.zeros(self._shapes[name])
        return self._checkpoint.tensor(name)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """All shards of `folder`, with headers read and lengths checked; closed on exit.

    Raises WeightsError naming the file that is absent, truncated or not safetensors, or the tensor
    that two files hold.
    """
    with ExitStack() as stack:
        shards = {}
        for path in weight_files(folder):
            shards[os.path.relpath(path, folder)] = stack.enter_context(_open_shard(path))
        yield Checkpoint(shards)


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        if is_lfs_pointer(path):
            raise WeightsError.about(
                str(path),
                expected="a complete safetensors file",
                got=LFS_POINTER,
                remedy=LFS_REMEDY,
            ) from error
        raise WeightsError.about(
            str(path),
            expected="a complete safetensors file",
            got=f"{path.stat().st_size} bytes ({error})",
            remedy="the file is truncated or damaged; download it again",
        ) from error


def _duplicate(name: str, first: str, second: str) -> WeightsError:
    return WeightsError.about(
        f"tensor '{name}'",
        expected="in one of the weight files",
        got=f"in {first} and in {second}",
        remedy="remove the file that is not part of the model",
    )
