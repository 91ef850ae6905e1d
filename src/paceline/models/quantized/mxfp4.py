"""MXFP4, as gpt-oss was released: only its experts, of which each 32 numbers share an exponent.

gate_up_proj_blocks [E, 2 I, H / 32, 16] uint8, gate_up_proj_scales [E, 2 I, H / 32] uint8
down_proj_blocks    [E, H, I / 32, 16] uint8,   down_proj_scales    [E, H, I / 32] uint8
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.models.fields import Fields
from paceline.models.quantized.scheme import (
    E8M0,
    Quantization,
    Stored,
    Weight,
    refuse_weight,
    require_dtype,
    require_shape,
)

_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Mxfp4(Quantization):
    def weights(self, module: str, stored: Mapping[str, Stored]) -> list[Weight]:
        from paceline.models.quantized.codes import mxfp4_stack

        found = []
        for name in sorted({_stem(name) for name in stored if name.endswith((_BLOCKS, _SCALES))}):
            parts = (name + _BLOCKS, name + _SCALES)
            if not set(parts) <= stored.keys():
                refuse_weight(f"{module}.{name}", " and ".join(parts), sorted(stored))
            blocks = stored[parts[0]]
            if len(blocks.shape) != 4 or blocks.shape[3] != 16 or blocks.dtype != "U8":
                refuse_weight(f"{module}.{name}", "uint8 [experts, rows, blocks, 16]", blocks)
            require_shape(f"{module}.{name}", parts[1], stored[parts[1]], blocks.shape[:3])
            require_dtype(f"{module}.{name}", parts[1], stored[parts[1]], "U8", E8M0)
            experts, rows, across, _ = blocks.shape
            found.append(Weight(name, (experts, 32 * across, rows), parts, mxfp4_stack))
        return found


def _stem(name: str) -> str:
    return name.removesuffix(_BLOCKS).removesuffix(_SCALES)


def read_mxfp4(fields: Fields) -> Mxfp4:
    """What is not converted has no scales: the file's list of it says nothing more."""
    return Mxfp4("mxfp4")
