"""fp8 weights with scales: of a tensor, of rows or of blocks (methods fp8 and fbgemm_fp8).

    W[n, k] = code[n, k] * scale[n // rows, k // columns]

DeepSeek's `weight_scale_inv` is multiplied with too, despite its name (inference/kernel.py of
DeepSeek-V3).  Activations stay in the model's dtype: it says more than 8 bits of them would.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from paceline.models.fields import Fields
from paceline.models.quantized.scheme import (
    E8M0,
    FP8,
    PLAIN,
    Quantization,
    Stored,
    Weight,
    coded_weight,
    groups,
    refuse_settings,
    refuse_weight,
    require_dtype,
    require_shape,
)

Block = tuple[int, int]  # rows, columns
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8(Quantization):
    """block: of scales that are neither of all rows nor of one; None: there are none."""

    block: Block | None

    def weights(self, module: str, stored: Mapping[str, Stored]) -> list[Weight]:
        return scaled_weight(module, stored, codes=FP8, block=self.block, rounds_inputs=True)


def read_fp8(fields: Fields) -> Fp8:
    """Raises ModelError."""
    refuse_settings(
        fields,
        {"activation_scheme": (None, "static", "dynamic"), "fmt": (None, "e4m3", "float8_e4m3fn")},
        "use a checkpoint of the method fp8 with e4m3 weights",
    )
    return Fp8(fields.choice("quant_method", ("fp8", "fbgemm_fp8")), read_block(fields))


def read_block(fields: Fields, name: str = "weight_block_size") -> Block | None:
    """Two positive integers, or None.  Raises ModelError."""
    value = fields.get(name)
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value  # "128x128" in older files
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_size(s) for s in sizes):
        fields.fail(name, "two positive integers", value)
    return int(sizes[0]), int(sizes[1])


def _is_size(value: object) -> bool:
    return str(value).isdecimal() and int(str(value)) > 0


def scaled_weight(
    module: str,
    stored: Mapping[str, Stored],
    *,
    codes: str,
    block: Block | None,
    rounds_inputs: bool,
) -> list[Weight]:
    """Of a module whose `weight` has `codes` (a dtype) and a scale beside it; zero points too,
    where there are.  rounds_inputs: whether its method does."""
    from paceline.models.quantized.codes import ScaleBlocks, plain_codes

    scales = [name for name in _SCALES if name in stored]
    weight = stored.get("weight")
    if weight is None or (weight.dtype != codes and not scales):
        return []
    if weight.dtype != codes:
        refuse_weight(module, f"{codes} codes, which '{scales[0]}' scales", weight.dtype)
    if len(scales) != 1 or len(weight.shape) != 2:
        refuse_weight(module, f"a matrix and one of {' and '.join(_SCALES)}", sorted(stored))
    rows, columns = weight.shape
    shape = stored[scales[0]].shape
    require_dtype(module, scales[0], stored[scales[0]], *PLAIN, E8M0)
    if shape in ((), (1,), (1, 1)):
        blocks = ScaleBlocks(rows, columns, (1, 1))
    elif shape in ((rows,), (rows, 1)):
        blocks = ScaleBlocks(1, columns, (rows, 1))
    elif block is None:
        refuse_weight(module, f"one scale, or one for each of {rows} rows", list(shape))
    else:
        blocks = ScaleBlocks(*block, (groups(rows, block[0]), groups(columns, block[1])))
        require_shape(module, scales[0], stored[scales[0]], blocks.table)
    parts: tuple[str, ...] = ("weight", scales[0])
    if "weight_zero_point" in stored:
        parts += ("weight_zero_point",)
        require_shape(module, parts[-1], stored[parts[-1]], shape)
        require_dtype(module, parts[-1], stored[parts[-1]], codes)
    scale = stored[scales[0]].dtype
    return [
        coded_weight(
            (rows, columns),
            parts,
            partial(plain_codes, blocks=blocks),
            kind="fp8" if codes == FP8 else "int8",
            group=blocks.columns,
            has_zeros=len(parts) == 3,
            scale_dtype="F32" if scale == E8M0 else scale,
            shared_rows=blocks.rows,
            rounds_inputs=rounds_inputs,
        )
    ]
