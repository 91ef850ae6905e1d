"""compressed-tensors: groups of modules, each with a format of its own.

Formats of a module's tensors (src/compressed_tensors/compressors of the public library):

    float-, int-, naive-quantized   weight [N, K] e4m3 or int8, weight_scale, weight_zero_point
    pack-quantized                  weight_packed [N, W] int32, weight_scale [N, G], weight_shape,
                                    and, where it is asymmetric, weight_zero_point packed along N
    nvfp4-pack-quantized            weight_packed [N, K / 2], weight_scale [N, K / 16] e4m3,
                                    weight_global_scale
    mxfp4-pack-quantized            weight_packed [N, K / 2], weight_scale [N, K / 32] exponents
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.models.fields import Fields
from paceline.models.quantized.fp8 import Block, read_block, scaled_weight
from paceline.models.quantized.scheme import (
    E8M0,
    FP8,
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

_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)
_STRATEGIES = (None, "tensor", "channel", "group", "block", "tensor_group")
_REQUANTISE = "convert it with llm-compressor: W4A16, W8A16, W8A8, FP8, NVFP4 or MXFP4, without "
# What a preset's name says of weights: bits, type, symmetric, strategy, group_size.
_PRESETS: dict[str, tuple[int, str, bool, str, int | None]] = {
    "W8A16": (8, "int", True, "group", 128),
    "W4A16": (4, "int", True, "group", 128),
    "W4A16_ASYM": (4, "int", False, "group", 128),
    "W8A8": (8, "int", True, "channel", None),
    "INT8": (8, "int", True, "channel", None),
    "W4A8": (4, "int", True, "group", 128),
    "W4AFP8": (4, "int", True, "group", 128),
    "FP8": (8, "float", True, "tensor", None),
    "FP8_DYNAMIC": (8, "float", True, "channel", None),
    "FP8_BLOCK": (8, "float", True, "block", None),
    "NVFP4": (4, "float", True, "tensor_group", 16),
    "NVFP4A16": (4, "float", True, "tensor_group", 16),
    "MXFP4": (4, "float", True, "group", 32),
    "MXFP4A16": (4, "float", True, "group", 32),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Modules and how their weights are stored."""

    targets: tuple[str, ...]
    bits: int
    type: str  # int or float
    symmetric: bool
    group_size: int | None  # columns that share a scale; None: all
    block: Block | None
    rounds_inputs: bool


@dataclass(frozen=True, slots=True)
class CompressedTensors(Quantization):
    """groups: in the file's order.  ignored: names and patterns of modules that stay plain."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]

    def weights(self, module: str, stored: Mapping[str, Stored]) -> list[Weight]:
        if not {"weight_packed", "weight_scale"} & stored.keys():
            return []
        ignoring = [entry for entry in self.ignored if _matches(entry, module)]
        if ignoring:
            refuse_weight(module, f"plain: 'ignore' has '{ignoring[0]}'", sorted(stored))
        group = self._group(module)
        if not group.symmetric and "weight_zero_point" not in stored:
            refuse_weight(module, "'weight_zero_point': symmetric is false", sorted(stored))
        if "weight_packed" not in stored:
            codes = FP8 if group.type == "float" else "I8"
            return scaled_weight(
                module,
                stored,
                codes=codes,
                block=group.block,
                rounds_inputs=group.rounds_inputs,
            )
        if group.type == "int":
            return [_packed_integers(module, stored, group)]
        return [_packed_floats(module, stored)]

    def _group(self, module: str) -> Group:
        """By its path, else by its class; every module with codes is a Linear."""
        for is_class in (False, True):
            for group in self.groups:
                for target in group.targets:
                    if (target == "Linear") if is_class else _matches(target, module):
                        return group
        refuse_weight(module, "one of the targets of config_groups", "in none of them")


def read_compressed_tensors(fields: Fields) -> CompressedTensors | None:
    """None where it is the cache's scales that it speaks of.  Raises ModelError."""
    for name in ("sparsity_config", "transform_config"):
        value = fields.nested(name)
        if value and value.get("format") != "dense":
            fields.fail(name, "absent", value, remedy=_REQUANTISE + "sparsity and transforms")
    ignored = fields.get("ignore") or []
    if not isinstance(ignored, list):
        fields.fail("ignore", "a list of module names and patterns", ignored)
    for entry in ignored:
        _compiled(fields, "ignore", str(entry))
    read = [_group(fields, name, given) for name, given in fields.nested("config_groups").items()]
    found = tuple(group for group in read if group is not None)
    if not found:
        return None
    return CompressedTensors("compressed-tensors", found, tuple(map(str, ignored)))


def _group(fields: Fields, name: str, given: Any) -> Group | None:
    """None where it quantises no weights."""
    where = f"config.json: quantization_config.config_groups.{name}"
    if name in _PRESETS and isinstance(given, list):
        bits, type_, symmetric, strategy, size = _PRESETS[name]
        given = {
            "targets": given,
            "weights": {"num_bits": bits, "type": type_, "symmetric": symmetric}
            | {"strategy": strategy, "group_size": size},
            "input_activations": {"type": "float"} if name.startswith("FP8") else None,
        }
    if not isinstance(given, Mapping):
        fields.fail(f"config_groups.{name}", "an object, or a preset with targets", given)
    group = Fields(given, where)
    if not group.nested("weights"):
        return None
    format_ = group.get("format") or fields.get("format")
    if format_ is not None and format_ not in _FORMATS:
        expected = f"one of {', '.join(_FORMATS)}"
        group.fail("format", expected, format_, remedy=_REQUANTISE + "sparsity")
    weights = Fields(group.nested("weights"), f"{where}.weights")
    refuse_settings(
        weights,
        {
            "num_bits": (4, 8),
            "type": ("int", "float"),
            "strategy": _STRATEGIES,
            "actorder": (None, "weight", "static", False),
        },
        _REQUANTISE + "actorder=group",
    )
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets:
        group.fail("targets", "a list of module names or classes", targets)
    for target in targets:
        _compiled(group, "targets", str(target))
    size = weights.get("group_size")
    is_block = weights.get("strategy") == "block"
    return Group(
        targets=tuple(map(str, targets)),
        bits=weights.integer("num_bits"),
        type=str(weights.get("type")),
        symmetric=weights.flag("symmetric", True),
        group_size=size if isinstance(size, int) and size > 0 else None,
        block=(read_block(weights, "block_structure") or (128, 128)) if is_block else None,
        rounds_inputs=bool(group.nested("input_activations")),
    )


def _compiled(fields: Fields, name: str, entry: str) -> None:
    """Raise ModelError for a pattern that is none."""
    if entry.startswith("re:"):
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error as error:
            fields.fail(name, "regular expressions behind 're:'", f"{entry} ({error})")


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def _packed_integers(module: str, stored: Mapping[str, Stored], group: Group) -> Weight:
    from paceline.models.quantized.codes import ScaleBlocks, packed_rows

    words, scale = stored["weight_packed"], stored.get("weight_scale")
    if words.dtype != "I32" or len(words.shape) != 2 or scale is None or len(scale.shape) != 2:
        refuse_weight(module, "int32 'weight_packed' and 'weight_scale', matrices", stored)
    if "weight_g_idx" in stored:
        refuse_weight(module, "no 'weight_g_idx' (activation order of groups)", sorted(stored))
    rows, columns = words.shape[0], words.shape[1] * 32 // group.bits
    size = group.group_size or columns
    if scale.shape == (rows, 1):  # older tools took one group for some presets
        size = columns
    blocks = ScaleBlocks(1, size, (rows, groups(columns, size)))
    require_shape(module, "weight_scale", scale, blocks.table)
    parts: tuple[str, ...] = ("weight_packed", "weight_scale")
    zero = stored.get("weight_zero_point")
    if zero is not None:
        words_of_zeros = groups(rows * group.bits, 32), blocks.table[1]
        require_shape(module, "weight_zero_point", zero, words_of_zeros)
        require_dtype(module, "weight_zero_point", zero, "I32")
        parts += ("weight_zero_point",)
    return coded_weight(
        (rows, columns),
        parts,
        partial(packed_rows, bits=group.bits, columns=columns, blocks=blocks),
        kind=f"int{group.bits}",
        group=size,
        has_zeros=zero is not None,
        scale_dtype=scale.dtype,
    )


def _packed_floats(module: str, stored: Mapping[str, Stored]) -> Weight:
    from paceline.models.quantized.codes import mxfp4, nvfp4

    packed, scale = stored["weight_packed"], stored.get("weight_scale")
    if packed.dtype != "U8" or len(packed.shape) != 2 or scale is None:
        refuse_weight(module, "uint8 'weight_packed', a matrix, and 'weight_scale'", stored)
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if "weight_global_scale" in stored:
        require_shape(module, "weight_scale", scale, (rows, columns // 16))
        require_dtype(module, "weight_scale", scale, FP8)
        whole = "weight_global_scale"
        require_shape(module, whole, stored[whole], (), (1,))
        parts: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_global_scale")
        return Weight("weight", (rows, columns), parts, partial(nvfp4, divides=True))
    require_shape(module, "weight_scale", scale, (rows, columns // 32))
    require_dtype(module, "weight_scale", scale, "U8", E8M0)
    return Weight("weight", (rows, columns), ("weight_packed", "weight_scale"), mxfp4)
