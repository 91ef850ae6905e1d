"""Tiny drafters on disk that guess well, for a tiny llama: made from its weights, not trained.

The target is nearly its first layer: `soften` weakens the others, folds the final norm into the
output head and gives every embedding one length, so that input norms are products with a constant.
A head then computes that layer over the embeddings it is given: those of positions 1 to p + 1, with
the target's own output behind them.  It misses the prompt's first token and the later layers, and
reads its feature weakly: most drafts are accepted, and each depends on all of the head's state.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from llm_cases import VOCAB, Checkpoint, make_checkpoint, save_tokenizer
from safetensors.torch import save_file
from torch import Tensor

LENGTH = 0.3  # root mean square of an embedding
WEAK = 0.25  # of the later layers' outputs
FEATURE = 0.04  # weights on features
DRAFT_VOCAB = 144
ECHO = 0.1  # of weights beside an embedding
OWN = {"num_hidden_layers": 1, "max_position_embeddings": 16}  # of a head: of its training texts

Tensors = dict[str, Tensor]


def soften(model: transformers.PreTrainedModel) -> None:
    """Edit a llama so that its first layer says most, without another meaning of any norm."""
    table = model.model.embed_tokens.weight
    table[0] = table[1].flip(0)  # of the padding token: 0 until now
    table.mul_(LENGTH / table.square().mean(-1, keepdim=True).sqrt())
    norm = model.model.norm.weight
    model.lm_head.weight.mul_(norm)
    norm.fill_(1.0)
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.mul_(WEAK)
        layer.mlp.down_proj.weight.mul_(WEAK)


def save_eagle(target: Checkpoint, folder: Path) -> Path:
    """An EAGLE-1 head: [embedding, feature] -> fc, and the target's first layer behind it."""
    torch.manual_seed(1)
    width = target.theirs.config.hidden_size
    layer, scale = _first_layer(target), _input_scale(target)
    named = {"fc.weight": torch.cat((torch.eye(width), _noise(width, width) / 4), dim=1)}
    for name in ("q_proj", "k_proj", "v_proj"):
        named[f"layers.0.self_attn.{name}.weight"] = layer[f"self_attn.{name}.weight"] * scale
    for name in ("self_attn.o_proj", "post_attention_layernorm", *_MLP):
        named[f"layers.0.{name}.weight"] = layer[f"{name}.weight"]
    return _save(target, folder, named, {"architectures": ["LlamaForCausalLMEagle"], "bias": False})


def save_eagle3(target: Checkpoint, folder: Path) -> Path:
    """An EAGLE-3 head with a vocabulary of its own, out of order in the target's.

    Its residual stream begins with the feature, so more heads look up the token's own embedding:
    queries and keys are that embedding, enlarged, and the values too.
    """
    torch.manual_seed(2)
    config = target.theirs.config
    width, dim = config.hidden_size, config.head_dim
    layer, norm = _first_layer(target), _first_layer(target)["input_layernorm.weight"]
    own = config.num_attention_heads * dim
    lookup = torch.zeros(-(-width // dim) * dim, width)
    lookup[:width] = torch.diag(1 / norm)
    per_kv = config.num_attention_heads // config.num_key_value_heads
    named: Tensors = {"fc.weight": _noise(width, 3 * width) / FEATURE * 0.1}
    for name, gain in (("q_proj", 3.0), ("k_proj", 3.0), ("v_proj", LENGTH)):
        weight = layer[f"self_attn.{name}.weight"]
        if name != "q_proj":
            weight = weight.view(-1, dim, width).repeat_interleave(per_kv, 0).flatten(0, 1)
        both = torch.cat((weight, gain * lookup))
        wide = torch.cat((both, _noise(len(both), width)), dim=1)
        named[f"midlayer.self_attn.{name}.weight"] = wide
    out = torch.zeros(width, own + len(lookup))
    out[:, :own] = layer["self_attn.o_proj.weight"]
    out[:, own : own + width] = torch.eye(width)
    named["midlayer.self_attn.o_proj.weight"] = out
    named["midlayer.input_layernorm.weight"] = norm
    named["midlayer.hidden_norm.weight"] = torch.full((width,), FEATURE)
    for name in ("post_attention_layernorm", *_MLP):
        named[f"midlayer.{name}.weight"] = layer[f"{name}.weight"]
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    named["norm.weight"] = torch.ones(width)
    named["lm_head.weight"] = target.theirs.lm_head.weight[ids]
    named["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    named["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    heads = (own + len(lookup)) // dim
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
    }
    return _save(target, folder, named, settings)


def save_echo(target: Checkpoint, folder: Path, norm: Tensor) -> Path:
    """An EAGLE-1 head of any model: it says what the embedding does, and a little of features and
    its own texts.

    norm: [hidden] weight of the target's norm in front of its output head.
    """
    torch.manual_seed(4)
    width, inner = target.theirs.config.hidden_size, 8
    feature = torch.randn(width, width) * ECHO * width**-0.5
    named = {"fc.weight": torch.cat((8 * norm.diag(), feature), dim=1)}  # it is sure
    shapes = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    shapes["mlp.down_proj"] = (width, inner)
    for name, shape in shapes.items():
        named[f"layers.0.{name}.weight"] = torch.randn(shape) * ECHO
    named["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle"],
        "bias": False,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCAB,
    }
    return _write(folder, named, settings | OWN)


def save_relative(case: str, folder: Path, *, noise: float, seed: int = 5) -> Path:
    """A model of a case of tiny_checkpoints, every parameter shaken by `noise` of its spread."""

    def shake(model: transformers.PreTrainedModel) -> None:
        if case.startswith("llama-"):
            soften(model)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std(correction=0), alpha=noise)

    return make_checkpoint(case, folder, change=shake).folder


_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape) * FEATURE


def _first_layer(target: Checkpoint) -> Tensors:
    tensors: Tensors = target.theirs.model.layers[0].state_dict()
    return tensors


def _input_scale(target: Checkpoint) -> Tensor:
    """[hidden]  what the first layer's input norm multiplies any embedding by."""
    return _first_layer(target)["input_layernorm.weight"] / LENGTH


def _save(target: Checkpoint, folder: Path, named: Tensors, settings: dict[str, Any]) -> Path:
    return _write(folder, named, target.theirs.config.to_dict() | OWN | settings)


def _write(folder: Path, named: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous().clone() for n, t in named.items()}, folder / "model.safetensors")
    save_tokenizer(folder)
    return folder
