"""Tiny checkpoints with a layer behind the last that predicts a token further, as released ones
have it, written by transformers."""

import json
from pathlib import Path

import tiny_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

_LATENT = ("deepseek_v3-bias-groups", "glm4_moe_lite-layer-kinds")
_QWEN = ("Qwen3Next", tiny_checkpoints.CASES["qwen3_next-unlike-heads"][1])
CASES = {
    **{name: tiny_checkpoints.CASES[name] for name in _LATENT},
    "qwen3_next-mtp": (
        _QWEN[0],
        _QWEN[1]
        | {
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "mlp_only_layers": [1],
        },
    ),
}
# Of the modules beside the layer: as DeepSeek names them, and as Qwen does.
_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def save_mtp(case: str, folder: Path) -> transformers.PreTrainedModel:
    """A case, whose last layer is the one that predicts further; returns the others' model."""
    whole = tiny_checkpoints.make_of(case, *CASES[case])
    whole.save_pretrained(folder)
    tensors, last = load_file(folder / "model.safetensors"), whole.config.num_hidden_layers - 1
    tensors |= _extra(whole, f"model.layers.{last}")
    if case.startswith("qwen"):
        tensors = {_below_mtp(name, last): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1, "eos_token_id": [2, 3]}
    for name in ("layer_types", "mlp_layer_types"):
        if name in config:
            config[name] = config[name][:last]
    file.write_text(json.dumps(config))
    return load_target(folder)


def _extra(whole: transformers.PreTrainedModel, prefix: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    size = whole.config.hidden_size
    norms = ("enorm", "hnorm", "shared_head.norm")
    named = {f"{prefix}.{name}.weight": 1.0 + 0.1 * torch.randn(size) for name in norms}
    named[f"{prefix}.eh_proj.weight"] = 0.12 * torch.randn(size, 2 * size)
    if not isinstance(whole, transformers.Qwen3NextForCausalLM):
        named[f"{prefix}.embed_tokens.weight"] = whole.model.embed_tokens.weight.clone()
        named[f"{prefix}.shared_head.head.weight"] = whole.lm_head.weight.clone()
    return named


def _below_mtp(name: str, last: int) -> str:
    own = name.removeprefix(f"model.layers.{last}.")
    module = own.removesuffix(".weight")
    if own == name:
        return name
    return f"mtp.{_NAMES[module]}.weight" if module in _NAMES else f"mtp.layers.0.{own}"


def load_target(folder: Path) -> transformers.PreTrainedModel:
    """The model in transformers, its layer behind the last left out."""
    transformers.logging.set_verbosity_error()  # it lists the layer as unexpected
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs.config._experts_implementation = "eager"
    return theirs.eval().requires_grad_(False)


def load_mtp(target: transformers.PreTrainedModel) -> MtpModel:
    """That layer, by transformers, which knows DeepSeek's by the number of layers of released
    models, and of others not that they have one."""
    target.config.num_mtp_layers, target.config.mtp_mlp_layer_types = 1, ["sparse"]
    target.config.mtp_layer_types = ["full_attention"]
    target._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{target.config.num_hidden_layers}\..*",
        r"^mtp.*",
    ]
    return MtpModel.from_pretrained(target).eval().requires_grad_(False)
