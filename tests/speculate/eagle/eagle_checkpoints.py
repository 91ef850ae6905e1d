"""Small random EAGLE heads as they are released, and the published formulas in plain torch.

Pieces of transformers (norm, gated MLP, rotary embedding, decoder layer) and nothing of ours.
EAGLE-1: Li et al. 2024, arXiv:2401.15077; EAGLE-3: arXiv:2503.01840 and its released weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

HIDDEN, VOCAB, DRAFT_VOCAB, TARGET_LAYERS = 48, 96, 40, 9
HEAD: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,  # of the training texts; the target's is longer
    "rope_theta": 300.0,
    "vocab_size": VOCAB,
}
EAGLE3 = HEAD | {"draft_vocab_size": DRAFT_VOCAB, "bias": False}

Tensors = dict[str, Tensor]


def target_model() -> transformers.LlamaForCausalLM:
    """Nine layers deep, so that the default taps are three different layers."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=56,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def noise(*shape: int, scale: float = 0.12) -> Tensor:
    return torch.randn(shape) * scale


def norm_weight(size: int) -> Tensor:
    return 1.0 + noise(size)


def layer_tensors(config: dict[str, Any], prefix: str, inputs: int) -> Tensors:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    named = {
        "self_attn.q_proj": noise(q, inputs),
        "self_attn.k_proj": noise(kv, inputs),
        "self_attn.v_proj": noise(kv, inputs),
        "self_attn.o_proj": noise(hidden, q),
        "mlp.gate_proj": noise(inner, hidden),
        "mlp.up_proj": noise(inner, hidden),
        "mlp.down_proj": noise(hidden, inner),
        "post_attention_layernorm": norm_weight(hidden),
    }
    return {f"{prefix}.{name}.weight": tensor for name, tensor in named.items()}


def eagle1_tensors(config: dict[str, Any]) -> Tensors:
    torch.manual_seed(12)
    hidden = config["hidden_size"]
    named = {"fc.weight": noise(hidden, 2 * hidden)}
    if config.get("bias", True):
        named["fc.bias"] = noise(hidden)
    for index in range(config["num_hidden_layers"]):
        named |= layer_tensors(config, f"layers.{index}", hidden)
        if index:
            named[f"layers.{index}.input_layernorm.weight"] = norm_weight(hidden)
    return named


def eagle3_tensors(
    config: dict[str, Any], *, num_taps: int = 3, target_hidden: int = HIDDEN
) -> Tensors:
    torch.manual_seed(13)
    hidden = config["hidden_size"]
    named = {"norm.weight": norm_weight(hidden)}
    if num_taps * target_hidden != hidden:
        named["fc.weight"] = noise(hidden, num_taps * target_hidden)
    if config.get("fc_norm"):
        for index in range(num_taps):
            named[f"fc_norm.{index}.weight"] = norm_weight(target_hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}" if index else "midlayer"
        named |= layer_tensors(config, prefix, hidden if index else 2 * hidden)
        named[f"{prefix}.hidden_norm.weight"] = norm_weight(hidden)
        if not index:
            named[f"{prefix}.input_layernorm.weight"] = norm_weight(hidden)
    if target_hidden != hidden:
        named["embed_tokens.weight"] = noise(VOCAB, hidden)
    draft_vocab = config.get("draft_vocab_size")
    if draft_vocab is not None:
        ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
        named["lm_head.weight"] = noise(draft_vocab, hidden)
        named["d2t"] = ids - torch.arange(draft_vocab)
        named["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return named


def reference_pass(
    config: dict[str, Any], named: Tensors, embedded: Tensor, features: Tensor, at: Tensor
) -> Tensor:
    """What the head makes of a whole sequence, each row seeing those before it.

    embedded, features: [tokens, hidden]; at: [tokens] positions.  Returns [tokens, hidden], the
    stream behind the last layer.
    """
    sizes = {name: value for name, value in config.items() if name != "architectures"}
    llama = transformers.LlamaConfig(**sizes, attn_implementation="eager")
    rope = LlamaRotaryEmbedding(llama)
    is_first3 = "midlayer.hidden_norm.weight" in named
    x = embedded
    if not is_first3:
        both = torch.cat((embedded, features), -1)
        x = F.linear(both, named["fc.weight"], named.get("fc.bias"))
    mask = torch.full((len(at), len(at)), float("-inf")).triu(1)[None, None]
    for index in range(config["num_hidden_layers"]):
        angles = rope(x[None], at[None])
        if is_first3 and index == 0:
            x = _eagle3_layer(llama, named, embedded, features, angles=angles, mask=mask)
            continue
        layer = LlamaDecoderLayer(llama, index).requires_grad_(False)
        own = _below(named, f"layers.{index}.")
        if "hidden_norm.weight" in own:
            own["input_layernorm.weight"] = own.pop("hidden_norm.weight")
        if index == 0:
            layer.input_layernorm = nn.Identity()
        layer.load_state_dict(own)
        x = layer(x[None], attention_mask=mask, position_embeddings=angles)[0]
    return x


def _eagle3_layer(
    llama: transformers.LlamaConfig,
    named: Tensors,
    embedded: Tensor,
    features: Tensor,
    *,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
) -> Tensor:
    own = _below(named, "midlayer.")
    attention = LlamaAttention(llama, 0).requires_grad_(False)
    for name in ("q_proj", "k_proj", "v_proj"):
        inner = nn.Linear(2 * llama.hidden_size, own[f"self_attn.{name}.weight"].shape[0], False)
        setattr(attention, name, inner.requires_grad_(False))
    attention.load_state_dict(_below(own, "self_attn."))
    mlp = LlamaMLP(llama).requires_grad_(False)
    mlp.load_state_dict(_below(own, "mlp."))
    normed = reference_norm(llama.rms_norm_eps, own["hidden_norm.weight"], features)
    start = normed if getattr(llama, "norm_before_residual", False) else features
    left = reference_norm(llama.rms_norm_eps, own["input_layernorm.weight"], embedded)
    x = torch.cat((left, normed), -1)[None]
    u = start + attention(x, position_embeddings=angles, attention_mask=mask)[0][0]
    after = own["post_attention_layernorm.weight"]
    return u + mlp(reference_norm(llama.rms_norm_eps, after, u))


def reference_norm(eps: float, weight: Tensor, x: Tensor) -> Tensor:
    norm = LlamaRMSNorm(weight.shape[0], eps=eps).requires_grad_(False)
    norm.load_state_dict({"weight": weight})
    return norm(x)


def _below(named: Tensors, prefix: str) -> Tensors:
    return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
