"""Repacked: a checkpoint in which some weights are packed as kernels read them, made one by one."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.packed_weight import FP8, PackedWeight, Packing, encode, pack_codes
from paceline.models.checkpoint import SPELLED, StoredTensors
from paceline.models.quantized.codes import Coded, require_factors

Pack = Callable[[str, Packing, torch.device], PackedWeight]  # of the weight of a name


class _Field(NamedTuple):
    weight: str  # the stored weight that it is of
    field: str  # of PackedWeight


class Repacked:
    """Weights in `packings` have `words`, `scale` and `zero` instead; others are as they are."""

    def __init__(
        self,
        checkpoint: StoredTensors,
        packings: Mapping[str, Packing],
        pack: Pack,
        device: torch.device,
    ) -> None:
        """packings: by the stored names of weights; device: where they are packed."""
        self._checkpoint = checkpoint
        self._packings = packings
        self._pack = pack
        self._device = device
        self._fields: dict[str, _Field] = {}
        self._names: list[str] = []
        self._last: tuple[str, PackedWeight] | None = None  # its fields are asked for in turn
        for name in checkpoint.names:
            if name not in packings:
                self._names.append(name)
                continue
            made = PackedWeight._fields if packings[name].has_zeros else PackedWeight._fields[:2]
            of_weight = {
                f"{name.removesuffix('weight')}{each}": _Field(name, each) for each in made
            }
            self._fields |= of_weight
            self._names += of_weight

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Reads no data."""
        made = self._fields.get(name)
        if made is None:
            return self._checkpoint.shape(name)
        rows, columns = self._checkpoint.shape(made.weight)
        packing = self._packings[made.weight]
        count = packing.num_words if made.field == "words" else packing.num_groups
        return rows, count(columns)

    def dtype(self, name: str) -> str:
        """As files spell it."""
        made = self._fields.get(name)
        if made is None:
            return self._checkpoint.dtype(name)
        scale = SPELLED[self._packings[made.weight].scale_dtype]
        return {"words": "I32", "scale": scale, "zero": "U8"}[made.field]

    def tensor(self, name: str) -> Tensor:
        """On the device of packing where it is made, else on the CPU.  Raises WeightsError for
        codes or scales that are no numbers."""
        made = self._fields.get(name)
        if made is None:
            return self._checkpoint.tensor(name)
        if self._last is None or self._last[0] != made.weight:
            self._last = None  # before another takes its place
            packing = self._packings[made.weight]
            self._last = made.weight, self._pack(made.weight, packing, self._device)
        found: Tensor = getattr(self._last[1], made.field)
        return found


def pack_coded(coded: Coded, packing: Packing) -> PackedWeight:
    """Raises ValueError as `require_factors`, for a scale that is 0 over numbers that are not 0,
    and for codes that are none."""
    rows, columns = coded.codes.shape
    groups = packing.num_groups(columns)
    scale = _by_row(coded.scale, coded, rows, groups)
    require_factors(scale.float(), signed=packing.kind != FP8)
    if packing.kind == FP8:
        codes, zero = coded.codes.view(torch.uint8), None
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise ValueError("a code that stands for no number")
        magnitude = codes & 0x7F
    else:
        codes = coded.codes.to(torch.uint8)
        assert coded.zero is not None, packing
        zero = _by_row(coded.zero, coded, rows, groups).to(torch.uint8)
        spread = zero if packing.group is None else zero.repeat_interleave(packing.group, dim=1)
        magnitude = codes - spread[:, :columns]
    if bool((scale == 0).any()):
        over = scale if packing.group is None else scale.repeat_interleave(packing.group, dim=1)
        if bool(((over[:, :columns] == 0) & (magnitude != 0)).any()):
            raise ValueError("a scale of 0 over codes that are not 0")
    return PackedWeight(
        pack_codes(codes, packing.bits),
        scale.to(packing.scale_dtype).contiguous(),
        zero.contiguous() if zero is not None and packing.has_zeros else None,
    )


def _by_row(table: Tensor, coded: Coded, rows: int, groups: int) -> Tensor:
    """A table of blocks as [rows, groups]."""
    table = table.reshape(coded.blocks.table)
    if table.shape[0] > 1:
        table = table.repeat_interleave(coded.blocks.rows, dim=0)[:rows]
    return table.expand(rows, groups)


def encoded(checkpoint: StoredTensors) -> Pack:
    """Of plain numbers: the nearest codes."""

    def pack(name: str, packing: Packing, device: torch.device) -> PackedWeight:
        return encode(checkpoint.tensor(name).to(device), packing)

    return pack
