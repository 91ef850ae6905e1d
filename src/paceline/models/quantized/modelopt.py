"""NVIDIA's ModelOpt: fp8 of tensors, rows or blocks, and NVFP4.

FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO   weight [N, K] e4m3 and weight_scale
NVFP4, W4A16_NVFP4                          weight [N, K / 2] uint8, weight_scale [N, K / 16]
                                            e4m3, weight_scale_2: one number
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from paceline.models.fields import Fields
from paceline.models.quantized.fp8 import scaled_weight
from paceline.models.quantized.scheme import (
    FP8,
    Quantization,
    Stored,
    Weight,
    refuse_settings,
    refuse_weight,
    require_dtype,
    require_shape,
)

_SERVED = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES"),
    *("NVFP4", "W4A16_NVFP4"),
)


@dataclass(frozen=True, slots=True)
class ModelOpt(Quantization):
    algorithm: str  # of _SERVED

    def weights(self, module: str, stored: Mapping[str, Stored]) -> list[Weight]:
        from paceline.models.quantized.codes import nvfp4

        if "pre_quant_scale" in stored:
            refuse_weight(module, "no 'pre_quant_scale' (algorithms of AWQ)", sorted(stored))
        is_fp4 = self.algorithm.endswith("NVFP4")
        if is_fp4 != ("weight_scale_2" in stored) and "weight_scale" in stored:
            wanted = "with" if is_fp4 else "without"
            refuse_weight(module, f"{wanted} 'weight_scale_2', as of {self.algorithm}", [*stored])
        if "weight_scale_2" not in stored:
            rounds = not self.algorithm.endswith("_WO")  # of weights only
            return scaled_weight(module, stored, codes=FP8, block=(128, 128), rounds_inputs=rounds)
        parts = ("weight", "weight_scale", "weight_scale_2")
        missing = [name for name in parts if name not in stored]
        if missing:
            refuse_weight(module, ", ".join(parts), f"no {', '.join(missing)}")
        packed = stored["weight"]
        if packed.dtype != "U8" or len(packed.shape) != 2:
            refuse_weight(module, "uint8 'weight', a matrix", packed)
        rows, columns = packed.shape[0], 2 * packed.shape[1]
        require_shape(module, "weight_scale", stored["weight_scale"], (rows, columns // 16))
        require_shape(module, parts[2], stored[parts[2]], (), (1,))
        require_dtype(module, "weight_scale", stored["weight_scale"], FP8)
        return [Weight("weight", (rows, columns), parts, partial(nvfp4, divides=False))]


def read_modelopt(fields: Fields) -> ModelOpt | None:
    """None where it is the cache alone that has a format.  Raises ModelError."""
    if not fields.get("quant_algo") and fields.get("kv_cache_quant_algo"):
        return None
    algorithm = str(fields.get("quant_algo") or "").upper()
    shown = Fields({"quant_algo": algorithm}, "config.json: quantization_config")
    remedy = f"use a checkpoint of {', '.join(_SERVED)}"
    refuse_settings(shown, {"quant_algo": _SERVED}, remedy)
    return ModelOpt("modelopt", algorithm)
