"""Small random checkpoints written by transformers, one per property worth telling apart."""

import zlib
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
_LATENT = _SIZES | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 28,
}
_YARN_ALL = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

_SIDE = _SIZES | {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "rope_parameters": _DEFAULT,
}
_FACTORS = {
    "embedding_multiplier": 3.1,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 1.7,
    "attention_out_multiplier": 0.8,
    "ssm_out_multiplier": 1.3,
    "ssm_multipliers": [0.7, 1.4, 0.9, 1.2, 0.6],
    "mlp_multipliers": [1.6, 0.7],
}
_GRANITE_HYBRID = (
    _SIZES
    | _LLAMA
    | {"num_hidden_layers": 3, "shared_intermediate_size": 36, "intermediate_size": 28}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 8}
    | {"embedding_multiplier": 3.1, "residual_multiplier": 0.37, "logits_scaling": 1.7}
    | {"attention_multiplier": 0.3, "rope_parameters": _DEFAULT}
)

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.2, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 6.0, 11.0, 13.0],
}


def _gemma_ropes(full: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 50}}


def longrope(original: int, context: int = CONTEXT, **settings: Any) -> dict[str, Any]:
    """Settings of a Phi-3 whose long factors serve contexts above `original`."""
    lengths = {"original_max_position_embeddings": original}
    own = {"rope_parameters": LONGROPE | lengths | settings}
    return _SIZES | _LLAMA | lengths | own | {"max_position_embeddings": context}


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
    "qwen3_moe-normalised-dense-layer": (
        "Qwen3Moe",
        _SIZES
        | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24}
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
        | {"norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3}
        | {"rope_parameters": _DEFAULT},
    ),
    "qwen3_moe-window-every-second-layer": (
        "Qwen3Moe",
        _SIZES
        | _LLAMA
        | {"num_experts": 40, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
        | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 11}
        | {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": _DEFAULT},
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
    "gemma2-soft-caps-alternating-windows": (
        "Gemma2",
        _GEMMA
        | {"num_key_value_heads": 2, "layer_types": None, "rope_parameters": _DEFAULT}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 5.0},
    ),
    "mistral-window-odd-heads": (
        "Mistral",
        _SIZES
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20}
        | {"sliding_window": 13, "rope_parameters": _DEFAULT},
    ),
    "gpt-oss-sinks-alternating-windows": (
        "GptOss",
        _SIZES
        | {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20}
        | {"num_hidden_layers": 3, "sliding_window": 9, "swiglu_limit": 0.75}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
                "truncate": False,
            }
        },
    ),
    "phi3-fused-window-half-rope": (
        "Phi3",
        _SIZES
        | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
        | {"sliding_window": 17, "tie_word_embeddings": True}
        | {"rope_parameters": _DEFAULT | {"partial_rotary_factor": 0.5}},
    ),
    "mixtral-window-rope-dynamic": (
        "Mixtral",
        _SIZES
        | _LLAMA
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28}
        | {"sliding_window": 11, "head_dim": 16}
        | {"rope_parameters": _DEFAULT | {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "qwen2_moe-shared-expert-dense-layer": (
        "Qwen2Moe",
        _SIZES
        | _LLAMA
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
        | {"shared_expert_intermediate_size": 36, "mlp_only_layers": [1], "num_hidden_layers": 3}
        | {"use_sliding_window": True, "sliding_window": 11, "rope_parameters": _DEFAULT},
    ),
    "qwen3_next-unlike-heads": (
        "Qwen3Next",
        _SIZES
        | {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12}
        | {"linear_value_head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 28, "shared_expert_intermediate_size": 36}
        | {"full_attention_interval": 2, "num_hidden_layers": 3, "mlp_only_layers": [0, 1]}
        | {"rms_norm_eps": 1e-3}  # what states are read for is small at first: norms enlarge it
        | {"rope_parameters": _DEFAULT | {"partial_rotary_factor": 0.5}},
    ),
    "gemma-one-kv-head": (
        "Gemma",
        _SIZES
        | {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
        | {"rope_parameters": _DEFAULT},
    ),
    "smollm3-windows-without-rope": (
        "SmolLM3",
        _SIZES
        | _LLAMA
        | {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "hidden_act": "relu"}
        | {"use_sliding_window": True, "sliding_window": 11, "rope_parameters": _DEFAULT},
    ),
    "granite-multipliers": (
        "Granite",
        _SIZES
        | _LLAMA
        | {"embedding_multiplier": 3.1, "residual_multiplier": 0.37, "logits_scaling": 1.7}
        | {"attention_multiplier": 0.3, "hidden_act": "gelu", "rope_parameters": _DEFAULT},
    ),
    "olmo2-norms-behind": (
        "Olmo2",
        _SIZES
        | {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
        | {"rope_parameters": _DEFAULT},
    ),
    "seed_oss-biases": (
        "SeedOss",
        _SIZES
        | _LLAMA
        | {"head_dim": 20, "attention_out_bias": True, "mlp_bias": True}
        | {"rope_parameters": _DEFAULT},
    ),
    "exaone4-windows": (
        "Exaone4",
        _SIZES
        | _LLAMA
        | {"head_dim": 20, "num_hidden_layers": 4, "sliding_window": 9}
        | {"sliding_window_pattern": 3, "rope_parameters": _DEFAULT},
    ),
    "exaone4-one-kind": (
        "Exaone4",
        _SIZES
        | _LLAMA
        | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 20}
        | {"rope_parameters": _DEFAULT},
    ),
    "deepseek_v2-no-query-latent": (
        "DeepseekV2",
        _LATENT | {"q_lora_rank": None, "rope_parameters": _DEFAULT, "topk_method": "greedy"},
    ),
    "deepseek_v2-groups-yarn": (
        "DeepseekV2",
        _LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}
        | {"routed_scaling_factor": 1.7, "attention_bias": True, "rope_parameters": _YARN_ALL},
    ),
    "deepseek_v3-bias-groups": (
        "DeepseekV3",
        _LATENT
        | {
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _YARN_ALL,
        }
        | {"num_mtp_layers": 0},
    ),
    "deepseek_v3-halves": (
        "DeepseekV3",
        _LATENT
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False}
        | {"rope_parameters": _DEFAULT, "num_mtp_layers": 0},
    ),
    "glm4_moe_lite-layer-kinds": (
        "Glm4MoeLite",
        _LATENT
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_experts_per_tok": 3}
        | {"rope_parameters": _DEFAULT, "routed_scaling_factor": 1.8},
    ),
    "minicpm3-multipliers": (
        "MiniCPM3",
        _SIZES
        | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 28}
        | {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12}
        | {"scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 40, "rope_parameters": _YARN_ALL}
        | {"tie_word_embeddings": False},
    ),
    "minicpm3-plain": (
        "MiniCPM3",
        _SIZES
        | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12}
        | {"scale_emb": 1, "scale_depth": None, "dim_model_base": None, "attention_bias": True}
        | {"rope_parameters": _DEFAULT},
    ),
    "mamba2-groups": (
        "Mamba2",
        _SIZES
        | {"hidden_size": 48, "num_heads": 6, "head_dim": 16, "state_size": 12, "n_groups": 2}
        | {"num_hidden_layers": 3, "chunk_size": 8},
    ),
    "mamba2-one-group": (
        "Mamba2",
        _SIZES
        | {"hidden_size": 48, "num_heads": 6, "head_dim": 16, "state_size": 12, "n_groups": 1}
        | {"chunk_size": 8},
    ),
    "mamba2-one-group-biases-tied": (
        "Mamba2",
        _SIZES
        | {"hidden_size": 40, "num_heads": 5, "head_dim": 16, "state_size": 20, "n_groups": 1}
        | {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "chunk_size": 8}
        | {"tie_word_embeddings": True},
    ),
    "granitemoehybrid-experts": (
        "GraniteMoeHybrid",
        _GRANITE_HYBRID | {"num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid-dense-rope": (
        "GraniteMoeHybrid",
        _GRANITE_HYBRID
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True}
        | {"tie_word_embeddings": True},
    ),
    "falcon_h1-factors": (
        "FalconH1",
        _SIDE | _FACTORS | {"attention_in_multiplier": 1.2, "ssm_in_multiplier": 0.8},
    ),
    "falcon_h1-norm-before-gate": (
        "FalconH1",
        _SIDE | {"mamba_rms_norm": True, "mamba_n_groups": 2, "tie_word_embeddings": True},
    ),
    "falcon_h1-norm-behind-gate-biases": (
        "FalconH1",
        _SIDE
        | _FACTORS
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None}
        | {"attention_bias": True, "mlp_bias": True, "projectors_bias": True}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "llama4_text-chunk11": (
        "Llama4",
        _SIZES
        | _LLAMA
        | {"num_hidden_layers": 4, "head_dim": 20, "intermediate_size": 28}
        | {"intermediate_size_mlp": 72, "interleave_moe_layer_step": 2, "num_local_experts": 3}
        | {"attention_chunk_size": 11, "no_rope_layers": [1, 0, 1, 1], "rope_parameters": _DEFAULT}
        | {"floor_scale": 7, "attn_scale": 0.4},
    ),
    "phi3-longrope-long": ("Phi3", longrope(8)),
    "phi3-longrope-short": ("Phi3", longrope(CONTEXT, factor=4.0)),
}


def make(case: str) -> transformers.PreTrainedModel:
    """The transformers model of a case, float32.  Norms and biases are random too, so that one left
    out or swapped shows.  Attention is `eager`: masks, windows and scale stand in plain sight."""
    return make_of(case, *CASES[case])


def make_of(name: str, family: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    """The same of a case that no list has; name: its seed."""
    has_text = family in ("Gemma3", "Llama4")
    config_name = f"{family}TextConfig" if has_text else f"{family}Config"
    config = getattr(transformers, config_name)(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(zlib.crc32(name.encode()))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for path, parameter in model.named_parameters():
        if parameter.dim() == 1 or path.endswith("bias"):
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        assert parameter.std() > 0, path
    return model


def save(case: str, folder: Path, *, max_shard_size: str = "100KB") -> transformers.PreTrainedModel:
    """Write the checkpoint of a case in several shards; returns its model."""
    model = make(case)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
