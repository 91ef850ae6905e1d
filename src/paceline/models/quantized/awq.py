"""AWQ, of the layout `gemm`: weights stored transposed, eight 4-bit codes in each word.

qweight [K, N / 8] int32, qzeros [G, N / 8] int32, scales [G, N] float16
W[n, k] = (code - zero) * scale
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from paceline.models.fields import Fields
from paceline.models.quantized.scheme import (
    Quantization,
    Stored,
    Weight,
    coded_weight,
    groups,
    refuse_settings,
    refuse_weight,
    require_shape,
)

PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True)
class Awq(Quantization):
    group_size: int | None  # columns that share a scale; None: all

    def weights(self, module: str, stored: Mapping[str, Stored]) -> list[Weight]:
        from paceline.models.quantized.codes import awq

        if not set(PARTS) & stored.keys():
            return []
        require_words(module, stored)
        (columns, words), (rows_of_scales, rows) = stored["qweight"].shape, stored["scales"].shape
        require_shape(module, "qweight", stored["qweight"], (columns, rows // 8))
        require_shape(module, "qzeros", stored["qzeros"], (rows_of_scales, words))
        group = group_of(module, self.group_size, columns, rows_of_scales)
        return [
            coded_weight(
                (rows, columns),
                PARTS,
                partial(awq, group=group),
                kind="int4",
                group=group,
                has_zeros=True,
                scale_dtype=stored["scales"].dtype,
            )
        ]


def read_awq(fields: Fields) -> Awq:
    """Raises ModelError."""
    said = {
        "version": str(fields.get("version") or "gemm").lower(),
        "bits": fields.get("bits") or fields.get("w_bit"),
        "group_size": fields.get("group_size") or fields.get("q_group_size"),
    }
    shown = Fields(said, "config.json: quantization_config")
    remedy = "use a checkpoint of 4 bits in AWQ's gemm layout"
    refuse_settings(shown, {"version": ("gemm",), "bits": (4, None)}, remedy)
    return Awq("awq", read_group_size(shown))


def require_words(module: str, stored: Mapping[str, Stored]) -> None:
    """Raise WeightsError unless packed codes, packed zero points and scales are there."""
    missing = [name for name in PARTS if name not in stored]
    if missing:
        refuse_weight(module, f"{', '.join(PARTS)}", f"no {', '.join(missing)}")
    for name, dtypes in zip(PARTS, (("I32",), ("I32",), ("F16", "BF16", "F32")), strict=True):
        if stored[name].dtype not in dtypes or len(stored[name].shape) != 2:
            refuse_weight(module, f"'{name}' a matrix of {' or '.join(dtypes)}", stored[name])


def read_group_size(fields: Fields) -> int | None:
    """None where the file says -1: one group.  Raises ModelError."""
    if fields.get("group_size") == -1:
        return None
    size: int = fields.integer("group_size", 128)
    return size


def group_of(module: str, size: int | None, columns: int, num_groups: int) -> int:
    """Columns that share a scale; the last group may be partial.  Raises WeightsError."""
    size = size or columns
    if num_groups != groups(columns, size):
        expected = f"'scales' for {groups(columns, size)} groups, of {size} of {columns} columns"
        refuse_weight(module, expected, f"{num_groups} groups")
    return size
