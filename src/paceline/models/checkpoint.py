"""The safetensors files of a folder as one lazily read set of named tensors."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import WeightsError, message

INDEX_NAME = "model.safetensors.index.json"


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
        self._shard_of: dict[str, Any] = {}
        for shard in shards.values():
            self._shard_of |= dict.fromkeys(shard.keys(), shard)

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


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """All shards of `folder`, with headers read and lengths checked; closed on exit.

    Raises WeightsError naming the file that is absent, truncated or not safetensors.
    """
    with ExitStack() as stack:
        shards = {}
        for path in shard_paths(folder):
            shards[path.name] = stack.enter_context(_open_shard(path))
        yield Checkpoint(shards)


def shard_paths(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, else every safetensors file."""
    index = folder / INDEX_NAME
    if index.is_file():
        paths = [folder / name for name in _indexed_files(index)]
    else:
        paths = sorted(folder.glob("*.safetensors"))
        paths = [path for path in paths if not path.name.startswith("consolidated")]
    absent = [path.name for path in paths if not path.is_file()]
    if not paths or absent:
        raise WeightsError(
            message(
                f"weights in {folder}",
                expected="every shard of the checkpoint" if absent else "*.safetensors files",
                got=f"no {', '.join(absent[:10])}" if absent else "none",
                remedy="download the model again" if absent else "convert it to safetensors",
            )
        )
    return paths


def _indexed_files(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(
            message(
                str(index),
                expected="an index with a weight_map",
                got=f"{type(error).__name__}: {error}",
                remedy="download the model again",
            )
        ) from error
    return files


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            message(
                str(path),
                expected="a complete safetensors file",
                got=f"{path.stat().st_size} bytes ({error})",
                remedy="the file is truncated or damaged; download it again",
            )
        ) from error
