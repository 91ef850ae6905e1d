"""A checkpoint in torch's own format, as released EAGLE heads are: one pytorch_model.bin."""

from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import WeightsError
from paceline.models.checkpoint import SPELLED

PICKLED_NAME = "pytorch_model.bin"


class PickledCheckpoint:
    """Names, shapes and contents, as of `models.checkpoint.Checkpoint`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        """As safetensors files spell it: "BF16", "F32", ..."""
        dtype = self._tensors[name].dtype
        return SPELLED.get(dtype, str(dtype))

    def tensor(self, name: str) -> Tensor:
        """On the CPU, pages of the file until it is copied."""
        return self._tensors[name]


def open_pickled(path: Path) -> PickledCheckpoint:
    """The tensors of a file; no code in it is run.  Raises WeightsError where it holds others."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged bytes raise whatever they happen to spell
        first = str(error).strip().splitlines() or [""]
        raise _refusal(path, f"{type(error).__name__}: {first[0]}") from error
    if not isinstance(stored, dict) or not all(isinstance(t, Tensor) for t in stored.values()):
        raise _refusal(path, "something else")
    return PickledCheckpoint({str(name): tensor for name, tensor in stored.items()})


def _refusal(path: Path, got: str) -> WeightsError:
    return WeightsError.about(
        str(path),
        expected="a complete file of named tensors",
        got=got,
        remedy="download it again, or convert it to safetensors",
    )
