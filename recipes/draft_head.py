"""The EAGLE-3 draft head in plain torch, and what of the target it reads.

Draft position p holds the token at p + 1 and a feature of position p; its output predicts the token
at p + 2.  The first feature is the target's (three hidden states, joined by `fc`); later ones are
the head's own outputs.  Parameters have the names and shapes of LlamaForCausalLMEagle3 checkpoints
(EAGLE-3, arXiv:2503.01840).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

ARCHITECTURE = "LlamaForCausalLMEagle3"


class TargetPass(NamedTuple):
    """What one pass of the target gives the head."""

    features: Tensor  # [num_rows, row_tokens, 3 * hidden]  outputs of the tapped layers
    logits: Tensor  # [num_rows, row_tokens, vocab]


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Layers whose outputs are read: the inputs of layers 2, L / 2 and L - 3."""
    return 1, num_layers // 2 - 1, num_layers - 4


def target_pass(model: LlamaForCausalLM, tokens: Tensor, taps: tuple[int, ...]) -> TargetPass:
    """Features and logits of whole rows; tokens [num_rows, row_tokens] int."""
    inner = model.model
    hidden = inner.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rotary = inner.rotary_emb(hidden, positions)
    tapped = {}
    for layer_id, layer in enumerate(inner.layers):
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        if layer_id in taps:
            tapped[layer_id] = hidden
    features = torch.cat([tapped[layer_id] for layer_id in taps], dim=-1)
    return TargetPass(features, model.lm_head(inner.norm(hidden)))


class RMSNorm(nn.Module):
    """In float32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """The projections; what attends to what is the caller's business."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., tokens, 2 * hidden] -> q, k, v, each [..., heads, tokens, head_dim]."""
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for p in projected)
        return q, k, v


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(width, eps)
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, config.intermediate_size)


class DraftHead(nn.Module):
    """One layer between the target's features and a draft vocabulary."""

    def __init__(self, config: LlamaConfig, draft_vocab_size: int) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def target_ids(self) -> Tensor:
        """[draft_vocab] int64: the target's id of every draft id."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def qkv(
        self, embedded: Tensor, feature: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens embedded [..., tokens, hidden] and features alike; positions [tokens]."""
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], dim=-1)
        q, k, v = layer.self_attn(x)
        cos, sin = self.rotary(positions)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [tokens, head_dim / 2] float32."""
        half = self.config.head_dim // 2
        exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
        angles = positions.float()[:, None] * rope_theta(self.config) ** -exponents
        return angles.cos(), angles.sin()

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, which is the next feature: [..., tokens, hidden].

        attended: [..., heads, tokens, head_dim].
        """
        layer = self.midlayer
        hidden = feature + layer.self_attn.o_proj(attended.transpose(-2, -3).flatten(-2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, feature: Tensor) -> Tensor:
        """[..., draft_vocab]"""
        return self.lm_head(self.norm(feature))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., tokens, head_dim], in the halves' order of Llama."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def rope_theta(config: LlamaConfig) -> float:
    return float(config.rope_parameters["rope_theta"])


def save_head(head: DraftHead, folder: Path, target: dict[str, object]) -> None:
    """Write a bf16 checkpoint; `target` is the target's config.json, whose fields are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else None)
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = target | {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 1,
        "intermediate_size": head.config.intermediate_size,
        "draft_vocab_size": len(head.d2t),
        "target_hidden_size": head.config.hidden_size,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").chmod(0o644)


def load_head(folder: Path, *, device: str, dtype: torch.dtype) -> DraftHead:
    """The head of a folder written by save_head."""
    if not (folder / "model.safetensors").exists():
        raise SystemExit(f"--head: expected a folder with model.safetensors, got {folder}")
    config = LlamaConfig.from_pretrained(folder)
    head = DraftHead(config, config.draft_vocab_size)
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.to(device, dtype).eval().requires_grad_(False)
