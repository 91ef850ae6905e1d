"""Small random checkpoints written by transformers, one per property worth telling apart."""

from pathlib import Path
from typing import Any

import torch
import transformers

CONTEXT = 128
_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 1000.0}
_LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_GEMMA = _SIZES | {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "query_pre_attn_scalar": 23,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


def _gemma_ropes(full: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 50}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa2-untied": ("Llama", _SIZES | _LLAMA | {"rope_parameters": _DEFAULT}),
    "llama-gqa7-tied": (
        "Llama",
        _SIZES
        | {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}
        | {"tie_word_embeddings": True, "rope_parameters": _DEFAULT},
    ),
    "llama-odd-heads-biases": (
        "Llama",
        _SIZES
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20}
        | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _DEFAULT},
    ),
    "llama-rope-linear": (
        "Llama",
        _SIZES | _LLAMA | {"rope_parameters": _DEFAULT | {"rope_type": "linear", "factor": 3.0}},
    ),
    "llama-rope-llama3": (
        "Llama",
        _SIZES
        | _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            }
        },
    ),
    "llama-rope-yarn": (
        "Llama",
        _SIZES
        | _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
            }
        },
    ),
    "qwen2-gqa7-window": (
        "Qwen2",
        _SIZES
        | {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
        | {"tie_word_embeddings": True, "rope_parameters": _DEFAULT},
    ),
    "qwen3-odd-heads": (
        "Qwen3",
        _SIZES
        | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24}
        | {"attention_bias": True, "rope_parameters": _DEFAULT},
    ),
    "gemma3-windows-two-ropes": (
        "Gemma3",
        _GEMMA
        | {"num_hidden_layers": 6, "rope_parameters": _gemma_ropes(_DEFAULT)}
        | {"final_logit_softcapping": 5.0},
    ),
    "gemma3-untied-full-rope-linear": (
        "Gemma3",
        _GEMMA
        | {"num_hidden_layers": 3, "layer_types": _GEMMA["layer_types"][:3]}
        | {"rope_parameters": _gemma_ropes(_DEFAULT | {"rope_type": "linear", "factor": 4.0})}
        | {"tie_word_embeddings": False, "attention_bias": True},
    ),
}


def make(case: str) -> transformers.PreTrainedModel:
    """The transformers model of a case, float32.  Norms and biases are random too, so that one left
    out or swapped shows.  Attention is `eager`: masks, windows and scale stand in plain sight."""
    family, settings = CASES[case]
    config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(sorted(CASES).index(case))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        assert parameter.std() > 0, name
    return model


def save(case: str, folder: Path, *, max_shard_size: str = "100KB") -> transformers.PreTrainedModel:
    """Write the checkpoint of a case in several shards; returns its model."""
    model = make(case)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
