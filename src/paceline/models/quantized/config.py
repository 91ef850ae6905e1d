"""Which method a checkpoint names, from its config.json or the file beside it.  No torch."""

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelError
from paceline.models.fields import Fields
from paceline.models.quantized.awq import read_awq
from paceline.models.quantized.compressed_tensors import read_compressed_tensors
from paceline.models.quantized.fp8 import read_fp8
from paceline.models.quantized.gptq import read_gptq
from paceline.models.quantized.modelopt import read_modelopt
from paceline.models.quantized.mxfp4 import read_mxfp4
from paceline.models.quantized.scheme import Quantization, Read

KEY = "quantization_config"
METHODS: dict[str, Read] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
}


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """config: a whole config.json, as `locate` brings it.  None: weights are plain numbers.

    Raises ModelError for a method, or a setting of one, that is not served.
    """
    given = said_of(config)
    if not given:
        return None
    fields = Fields({KEY: given}).nested(KEY)
    method = fields.get("quant_method")
    producer = fields.get("producer")
    if method is None and isinstance(producer, Mapping):
        method = producer.get("name")  # of ModelOpt's older exports
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError.about(
            f"config.json: {KEY}.quant_method",
            expected=f"one of {', '.join(METHODS)}",
            got=repr(method),
            remedy="use a checkpoint of one of these methods (llm-compressor writes "
            "compressed-tensors), or an unquantised one",
        )
    return METHODS[method](Fields(fields, f"config.json: {KEY}"))


def said_of(config: Mapping[str, Any]) -> Any:
    """The field, or None, as it stands or in older files stood."""
    inner = config.get("text_config")
    for file in (config, inner if isinstance(inner, Mapping) else {}):
        for name in (KEY, "compression_config"):
            if file.get(name) is not None:
                return file[name]
    return None


def from_side_file(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config that one of SIDE_FILES holds."""
    if name == "hf_quant_config.json":
        inner = data.get("quantization")
        return {**(inner if isinstance(inner, Mapping) else {}), "quant_method": "modelopt"}
    method = "awq" if name == "quant_config.json" else "gptq"
    return {"quant_method": method, **data}


SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
