"""GPTQ: weights stored transposed, codes packed along the inputs, zero points along the outputs.

qweight [K * bits / 32, N] int32, qzeros [G, N * bits / 32] int32, scales [G, N] float16,
g_idx [K] int32: the group of each column
W[n, k] = (code - zero) * scale
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.models.fields import Fields
from paceline.models.quantized.awq import PARTS, group_of, read_group_size, require_words
from paceline.models.quantized.scheme import (
    Quantization,
    Stored,
    Weight,
    coded_weight,
    refuse_settings,
    refuse_weight,
    require_shape,
)


@dataclass(frozen=True, slots=True)
class Gptq(Quantization):
    bits: int
    group_size: int | None  # columns that share a scale; None: all
    is_v2: bool | None  # None: zero points are those of symmetric weights, and tell it

    def weights(self, module: str, stored: Mapping[str, Stored]) -> list[Weight]:
        from paceline.models.quantized.codes import gptq

        if not set(PARTS) & stored.keys():
            return []
        require_words(module, stored)
        (words, rows), (num_groups, rows_of_scales) = (
            stored["qweight"].shape,
            stored["scales"].shape,
        )
        columns = words * 32 // self.bits
        if rows != rows_of_scales:
            expected = f"'qweight' [inputs * {self.bits} / 32, {rows_of_scales}], as of GPTQ"
            refuse_weight(module, expected, list(stored["qweight"].shape))
        require_shape(module, "qzeros", stored["qzeros"], (num_groups, rows * self.bits // 32))
        parts: tuple[str, ...] = PARTS
        if "g_idx" in stored:
            require_shape(module, "g_idx", stored["g_idx"], (columns,))
            parts += ("g_idx",)
        group = group_of(module, self.group_size, columns, num_groups)
        make = partial(gptq, bits=self.bits, group=group, is_v2=self.is_v2)
        return [
            coded_weight(
                (rows, columns),
                parts,
                make,
                kind=f"int{self.bits}",
                group=group,
                has_zeros=self.is_v2 is not None,
                scale_dtype=stored["scales"].dtype,
            )
        ]


def read_gptq(fields: Fields) -> Gptq:
    """Raises ModelError."""
    named = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    remedy = "use a checkpoint of 4 or 8 bits in the layout gptq or gptq_v2, without desc_act"
    shown = Fields(
        {
            "bits": fields.get("bits"),
            "group_size": fields.get("group_size"),
            "checkpoint_format": named,
            "dynamic": _overrides(fields) or None,
            "desc_act": bool(fields.get("desc_act")) and not bool(fields.get("static_groups")),
        },
        "config.json: quantization_config",
    )
    served = {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "dynamic": (None,)}
    refuse_settings(shown, {**served, "desc_act": (False,)}, remedy)
    is_v2 = named == "gptq_v2" if fields.get("sym") is False else None
    return Gptq("gptq", shown.integer("bits"), read_group_size(shown), is_v2)


def _overrides(fields: Fields) -> Any:
    """What `dynamic` says of modules with codes of another kind.  Those it leaves out, whose
    patterns begin with "-:", have no codes: tensors tell them."""
    said = fields.get("dynamic")
    if not isinstance(said, Mapping):
        return said
    return {name: each for name, each in said.items() if not str(name).startswith("-:")}
