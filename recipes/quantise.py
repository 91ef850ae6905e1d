"""Write a checkpoint in the formats that quantised ones come in.

    python recipes/quantise.py src/paceline/models/bundled awq /tmp/bundled-awq
    paceline generate --model /tmp/bundled-awq --prompt "def main():"

Every linear layer but the head and routers is rounded to nearest; gpt-oss's experts are stacked,
and are all that mxfp4 takes.  Nothing is calibrated: these are checkpoints to load, not to serve.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32  # columns that share a scale, where a format has groups
BLOCK = (128, 128)
E4M3 = torch.float8_e4m3fn
MOST_E4M3, MOST_E2M1 = 448.0, 6.0
PLAIN = ("lm_head", "embed_tokens", ".gate.weight", "router", "norm")
Parts = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="folder of a plain checkpoint")
    parser.add_argument("format", choices=sorted(FORMATS), help="what to write")
    parser.add_argument("out", type=Path, help="folder to make")
    args = parser.parse_args()
    count = quantise(args.source, args.format, args.out)
    print(f"{count} weights of {args.source} as {args.format}: {args.out}")


def quantise(source: Path, format_: str, out: Path) -> int:
    """Copy `source` to `out` with its linear layers in `format_`; how many there are."""
    settings, encode = FORMATS[format_]
    if out.exists():
        raise SystemExit(f"{out} must be a new folder, and is there; name another or remove it")
    stored: Parts = {}
    for path in sorted(source.glob("*.safetensors")):
        stored |= load_file(path)
    written: Parts = {}
    count = 0
    for name, tensor in stored.items():
        if not is_quantised(name, tensor, stacked=format_ == "mxfp4"):
            written[name] = tensor
            continue
        if tensor.shape[-1] % GROUP:
            raise SystemExit(f"{name}: columns must come in {GROUP}s, got {list(tensor.shape)}")
        count += 1
        module, _, last = name.rpartition(".")
        prefix = module if last == "weight" else name
        for part, value in encode(tensor.float()).items():
            written[f"{prefix}{part if part.startswith('_') else '.' + part}"] = value.contiguous()
    if not count:
        raise SystemExit(f"{source} must have weights that {format_} takes, and has none")
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, out / path.name)
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    for index in out.glob("*.index.json"):
        index.unlink()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = settings
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return count


def is_quantised(name: str, tensor: Tensor, *, stacked: bool) -> bool:
    """Whether a tensor becomes codes."""
    if stacked:
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    is_linear = name.endswith(".weight") and tensor.dim() == 2
    return is_linear and not any(part in name for part in PLAIN)


def _fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-MOST_E4M3, MOST_E4M3).to(E4M3)


def fp8_tensor(weight: Tensor) -> Parts:
    scale = weight.abs().amax() / MOST_E4M3
    return {"weight": _fp8(weight, scale), "weight_scale": scale, "input_scale": scale.clone()}


def fp8_rows(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / MOST_E4M3
    return {"weight": _fp8(weight, scale), "weight_scale": scale}


def fp8_blocks(weight: Tensor) -> Parts:
    rows, columns = weight.shape
    above = torch.nn.functional.pad(weight.abs(), (0, -columns % BLOCK[1], 0, -rows % BLOCK[0]))
    down, across = above.shape[0] // BLOCK[0], above.shape[1] // BLOCK[1]
    scale = above.view(down, BLOCK[0], across, BLOCK[1]).amax((1, 3)) / MOST_E4M3
    spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return {"weight": _fp8(weight, spread[:rows, :columns]), "weight_scale_inv": scale}


def int8_rows(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def pack(fields: Tensor, bits: int) -> Tensor:
    """[rows, columns] unsigned -> [rows, columns * bits / 32] int32, the lowest field first."""
    rows, columns = fields.shape
    per = 32 // bits
    fields = torch.nn.functional.pad(fields, (0, -columns % per)).long().view(rows, -1, per)
    words = (fields << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _symmetric(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [N, K], offset by half their range, and scale [N, G]."""
    grouped = weight.view(weight.shape[0], -1, GROUP)
    half = 1 << bits - 1
    scale = (grouped.abs().amax(2) / (half - 1)).clamp(min=1e-8)
    codes = (grouped / scale.unsqueeze(2)).round().clamp(-half, half - 1) + half
    return codes.flatten(1), scale


def _asymmetric(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scale and zero [N, G]."""
    grouped, most = weight.view(weight.shape[0], -1, GROUP), (1 << bits) - 1
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scale = ((high - low) / most).clamp(min=1e-8).half().float()
    zero = (-low / scale).round().clamp(0, most)
    codes = ((grouped / scale.unsqueeze(2)).round() + zero.unsqueeze(2)).clamp(0, most)
    return codes.flatten(1), scale, zero


def packed(bits: int, *, symmetric: bool) -> Callable[[Tensor], Parts]:
    """compressed-tensors' pack-quantized."""

    def encode(weight: Tensor) -> Parts:
        shape = {"weight_shape": torch.tensor(weight.shape)}
        if symmetric:
            codes, scale = _symmetric(weight, bits)
            return {"weight_packed": pack(codes, bits), "weight_scale": scale} | shape
        codes, scale, zero = _asymmetric(weight, bits)
        words = pack(zero.T.contiguous(), bits).T
        return {
            "weight_packed": pack(codes, bits),
            "weight_scale": scale,
            "weight_zero_point": words,
        } | shape

    return encode


def awq(weight: Tensor) -> Parts:
    codes, scale, zero = _asymmetric(weight, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # field i of a word has its column order[i]

    def words(table: Tensor) -> Tensor:
        columns = table.T.unflatten(1, (-1, 8))[..., order].flatten(1)
        return pack(columns, 4)

    return {"qweight": words(codes), "qzeros": words(zero), "scales": scale.T.half()}


def gptq(bits: int, *, symmetric: bool, version: int) -> Callable[[Tensor], Parts]:
    def encode(weight: Tensor) -> Parts:
        if symmetric:
            codes, scale = _symmetric(weight, bits)
            scale = scale.half().float()
            zero = torch.full_like(scale, 1 << bits - 1)
        else:
            codes, scale, zero = _asymmetric(weight, bits)
        stored = zero if version == 2 else (zero - 1) % (1 << bits)
        return {
            "qweight": pack(codes, bits).T,
            "qzeros": pack(stored.T.contiguous(), bits),
            "scales": scale.T.half(),
            "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
        }

    return encode


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e2m1(numbers: Tensor) -> Tensor:
    """[..., K] -> [..., K / 2] uint8, the low half first."""
    codes = (numbers.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1) + 8 * (numbers < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def _exponents(grouped: Tensor) -> Tensor:
    """The least powers of two that bring groups [..., 32] into e2m1's range, as bytes."""
    most = grouped.abs().amax(-1).clamp(min=2.0**-100)
    return (torch.ceil(torch.log2(most / MOST_E2M1)) + 127).to(torch.uint8)


def mxfp4_stack(weight: Tensor) -> Parts:
    """Of [experts, K, N], as transformers holds them."""
    grouped = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = _exponents(grouped)
    numbers = grouped / torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return {"_blocks": _e2m1(numbers), "_scales": exponents}


def mxfp4(weight: Tensor) -> Parts:
    grouped = weight.unflatten(1, (-1, 32))
    exponents = _exponents(grouped)
    numbers = grouped / torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return {"weight_packed": _e2m1(numbers).flatten(1), "weight_scale": exponents}


def nvfp4(*, modelopt: bool) -> Callable[[Tensor], Parts]:
    def encode(weight: Tensor) -> Parts:
        grouped = weight.unflatten(1, (-1, 16))
        whole = weight.abs().amax() / (MOST_E4M3 * MOST_E2M1)
        scale = (grouped.abs().amax(2) / MOST_E2M1 / whole).to(E4M3)
        spread = (scale.float() * whole).clamp(min=1e-12).unsqueeze(2)
        codes = _e2m1((grouped / spread).flatten(1))
        if modelopt:
            return {"weight": codes, "weight_scale": scale, "weight_scale_2": whole}
        shared = {"weight_packed": codes, "weight_scale": scale}
        return shared | {"weight_global_scale": (1 / whole).reshape(1)}

    return encode


def compressed(format_: str, **weights: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _ints(bits: int, symmetric: bool, strategy: str = "group") -> dict[str, Any]:
    size = GROUP if strategy == "group" else None
    kind = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    return kind | {"strategy": strategy, "group_size": size}


def _floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Parts]]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        fp8_blocks,
    ),
    "fp8-rows": (compressed("float-quantized", **_floats(8, "channel")), fp8_rows),
    "w8a8": (compressed("int-quantized", **_ints(8, True, "channel")), int8_rows),
    "w4a16": (compressed("pack-quantized", **_ints(4, True)), packed(4, symmetric=True)),
    "w4a16-asym": (compressed("pack-quantized", **_ints(4, False)), packed(4, symmetric=False)),
    "w8a16": (compressed("pack-quantized", **_ints(8, True)), packed(8, symmetric=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": (_GPTQ | {"bits": 4, "sym": True}, gptq(4, symmetric=True, version=1)),
    "gptq-asym": (_GPTQ | {"bits": 4, "sym": False}, gptq(4, symmetric=False, version=1)),
    "gptq-v2-8bit": (
        _GPTQ | {"bits": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(8, symmetric=False, version=2),
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4_stack),
    "mxfp4-linear": (
        compressed("mxfp4-pack-quantized", **_floats(4, "group", group_size=32)),
        mxfp4,
    ),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", **_floats(4, "tensor_group", group_size=16)),
        nvfp4(modelopt=False),
    ),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(modelopt=True)),
}


if __name__ == "__main__":
    main()
