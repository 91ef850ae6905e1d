"""Dequantised: a checkpoint of codes and scales, seen as one of plain numbers."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.errors import WeightsError
from paceline.kernels.packed_weight import CHUNK, FP8, PackedWeight, Packing, packable
from paceline.models.checkpoint import SPELLED, StoredTensors
from paceline.models.quantized.repacked import pack_coded
from paceline.models.quantized.scheme import Quantization, Stored, Weight, unread

DTYPES = {spelled: dtype for dtype, spelled in SPELLED.items()}


@dataclass(frozen=True, slots=True)
class _Made:
    module: str
    weight: Weight


class Dequantised:
    """Weights have the names that a plain checkpoint gives them; other tensors are as they are."""

    def __init__(self, checkpoint: StoredTensors, quantization: Quantization, *, model: str):
        """model: the name errors speak of.  Raises WeightsError for a weight that is incomplete,
        and for a checkpoint that has none."""
        self._checkpoint = checkpoint
        self._made: dict[str, _Made] = {}
        self._names: list[str] = []
        for module, stored in _by_module(checkpoint).items():
            weights = quantization.weights(module, stored)
            used = {part for weight in weights for part in weight.parts}
            if weights:
                used |= unread(stored)
            for weight in weights:
                name = _joined(module, weight.name)
                self._made[name] = _Made(module, weight)
                self._names.append(name)
            self._names += [_joined(module, name) for name in stored if name not in used]
        if not self._made:
            raise WeightsError.about(
                f"weights of '{model}'",
                expected=f"quantised by {quantization.method}, as config.json says",
                got="no tensor of codes with scales",
                remedy="take quantization_config out of config.json if the weights are plain",
            )

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return self._names

    def is_idle(self, name: str) -> bool:
        """Whether it is a bias of zeros beside codes, as GPTQ's tools write for layers without
        one."""
        module, _, last = name.rpartition(".")
        of_codes = last == "bias" and _joined(module, "weight") in self._made
        return of_codes and not bool(self._checkpoint.tensor(name).any())

    def is_made(self, name: str) -> bool:
        """Whether it stands for codes."""
        return name in self._made

    def shape(self, name: str) -> tuple[int, ...]:
        """As of a plain checkpoint; reads no data."""
        made = self._made.get(name)
        return self._checkpoint.shape(name) if made is None else made.weight.shape

    def dtype(self, name: str) -> str:
        """As files spell it; what is made is float32."""
        return self._checkpoint.dtype(name) if name not in self._made else "F32"

    def packing(self, name: str) -> Packing | None:
        """How a weight stays codes; None where it is plain, or no kernel reads its form."""
        made = self._made.get(name)
        kind = None if made is None else made.weight.kind
        if made is None or kind is None:
            return None
        weight = made.weight
        is_known = weight.group is None or packable(weight.group, weight.shape[1])
        if not is_known or (kind == FP8 and weight.has_zeros):
            return None
        packing = Packing(
            kind,
            weight.group,
            weight.has_zeros,
            DTYPES[weight.scale_dtype],
            shared_rows=weight.shared_rows if weight.shared_rows == weight.group == CHUNK else 1,
        )
        return replace(packing, rounds_inputs=weight.rounds_inputs and packing.can_round_inputs)

    def packed(self, name: str, packing: Packing, device: torch.device) -> PackedWeight:
        """Of a weight with this `packing`, made on `device`.  Raises WeightsError as `tensor`."""
        made = self._made[name]
        assert made.weight.coded is not None, name
        parts = [_joined(made.module, part) for part in made.weight.parts]
        stored = [self._checkpoint.tensor(part).to(device) for part in parts]
        try:
            return pack_coded(made.weight.coded(*stored), packing)
        except ValueError as error:
            raise _broken(name, parts, str(error)) from error

    def tensor(self, name: str) -> Tensor:
        """On the CPU.  Raises WeightsError for codes or scales that are no numbers."""
        made = self._made.get(name)
        if made is None:
            return self._checkpoint.tensor(name)
        parts = [_joined(made.module, part) for part in made.weight.parts]
        try:
            numbers: Tensor = made.weight.make(*map(self._checkpoint.tensor, parts))
        except ValueError as error:
            raise _broken(name, parts, str(error)) from error
        if not bool(numbers.isfinite().all()):
            raise _broken(name, parts, "a code or an exponent that stands for no number")
        return numbers


def _by_module(checkpoint: StoredTensors) -> dict[str, dict[str, Stored]]:
    found: dict[str, dict[str, Stored]] = {}
    for name in checkpoint.names:
        module, _, last = name.rpartition(".")
        stored = Stored(tuple(checkpoint.shape(name)), checkpoint.dtype(name))
        found.setdefault(module, {})[last] = stored
    return found


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _broken(name: str, parts: list[str], got: str) -> WeightsError:
    return WeightsError.about(
        f"the quantised weight '{name}'",
        expected=f"codes in order and scales that stand for numbers in {', '.join(parts)}",
        got=got,
        remedy="download it again, or take a checkpoint that was made otherwise",
    )
