"""config.json and generation_config.json -> ModelConfig.  Imports no torch.

What a file asks for and we do not do is refused by name.  Defaults are those of the model's own
configuration class in transformers, because released files leave them out (Gemma 3 above all).
"""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.activations import ACTIVATIONS
from paceline.core.errors import ModelError, message
from paceline.core.model_config import ModelConfig, RopeKind
from paceline.core.options import DTYPES
from paceline.models.config_gemma import read_gemma2, read_gemma3
from paceline.models.config_moe import (
    gpt_oss_fields,
    gpt_oss_windows,
    read_gpt_oss_experts,
    read_qwen3_experts,
    refuse_mxfp4,
)
from paceline.models.config_rope import context_limit, read_phi3_rope, read_rope
from paceline.models.config_windows import read_windows, uniform_windows, upper_windows
from paceline.models.fields import Fields
from paceline.models.registry import ARCHITECTURES

MOST_LAYERS = 10_000  # a list per layer is built from the number before anything else is known


def parse_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The model's shape.  End tokens of both files count.

    Raises ModelError for an unknown model_type or an unsupported feature.
    """
    text = _text_config(config)
    fields = Fields(text)
    refuse_mxfp4(fields)
    if not _quantizes_cache_only(fields.get("quantization_config")):
        fields.refuse("quantization_config", "use an unquantised checkpoint")
    fields.refuse("draft_vocab_size", "pass a draft head with --speculative-draft-model-path")
    fields.refuse("use_bidirectional_attention", "only causal language models are supported")
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        known = ", ".join(sorted({*_READERS, "gemma3"}))
        raise ModelError(
            message(
                "config.json: model_type",
                expected=f"one of {known}",
                got=repr(model_type),
                remedy="use a model of a supported architecture",
            )
        )
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        fields.fail("num_hidden_layers", f"at most {MOST_LAYERS}", layers)
    parsed = _READERS[model_type](fields)
    common = {
        "model_type": model_type,
        "eos_token_ids": _eos_token_ids(text, generation_config or {}),
        "dtype": _dtype(fields),
    }
    return _checked(ModelConfig(**common, **parsed), fields)


def _quantizes_cache_only(quantization: object) -> bool:
    """Whether a quantization_config leaves weights and activations alone: compressed-tensors with
    a kv_cache_scheme and no group of layers."""
    if not isinstance(quantization, Mapping):
        return False
    return bool(quantization.get("kv_cache_scheme")) and not quantization.get("config_groups")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part; outer fields of a multimodal file count where it is silent."""
    if config.get("model_type") != "gemma3":
        return config
    inner = Fields(config).nested("text_config")
    shared = ("eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
    outer = {name: config[name] for name in shared if config.get(name) is not None}
    return {**inner, **outer, "model_type": "gemma3_text"}


def _llama(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return _prenorm(fields) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", False),
        "layer_windows": read_windows(fields, window=None, default=lambda _: False),
    }


def _mistral(fields: Fields) -> dict[str, Any]:
    fields.refuse("layer_types", "mistral has one kind of layer; use a model of another type")
    shared = _prenorm(fields)
    window = fields.integer("sliding_window", fields.unless_null("sliding_window", 4096))
    return shared | {
        "attention_bias": False,
        "attention_out_bias": False,
        "mlp_bias": False,
        "layer_windows": uniform_windows(shared, window),
    }


def _phi3(fields: Fields) -> dict[str, Any]:
    fields.refuse("layer_types", "phi3 has one kind of layer; use a model of another type")
    shared = _prenorm(fields, eps=1e-5, partial_rope=True)
    return shared | {
        "attention_bias": False,
        "attention_out_bias": False,
        "mlp_bias": False,
        "layer_windows": uniform_windows(shared, fields.integer("sliding_window", None)),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    return _prenorm(fields) | {
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "layer_windows": upper_windows(fields),
    }


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return _prenorm(fields, head_dim=128) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": False,
        "layer_windows": upper_windows(fields),
    }


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    shared, bias = _prenorm(fields), fields.flag("attention_bias", False)
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", 4096)
    return shared | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": False,
        "layer_windows": uniform_windows(shared, window),
        "moe": read_qwen3_experts(fields),
    }


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    fields = gpt_oss_fields(fields)
    bias = fields.flag("attention_bias", True)
    return _prenorm(fields, head_dim=64, eps=1e-5) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": False,
        "layer_windows": gpt_oss_windows(fields),
        "attention_sinks": True,
        "moe": read_gpt_oss_experts(fields),
    }


def _prenorm(
    fields: Fields, head_dim: int | None = None, *, eps: float = 1e-6, partial_rope: bool = False
) -> dict[str, Any]:
    """Fields that Llama, Mistral, Phi and Qwen spell alike."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if heads > hidden:
        fields.fail("num_attention_heads", f"at most hidden_size {hidden}", heads)
    dim = fields.integer("head_dim", head_dim or hidden // heads)
    rope, rotary_dim = (
        read_phi3_rope(fields, head_dim=dim) if partial_rope else (read_rope(fields), dim)
    )
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": dim,
        "v_head_dim": dim,
        "rotary_dim": rotary_dim,
        "max_position": context_limit(rope, fields.integer("max_position_embeddings")),
        "rms_norm_eps": fields.number("rms_norm_eps", eps),
        "rope": rope,
        "rope_local": None,
        "attention_scale": dim**-0.5,
        "attention_soft_cap": None,
        "logit_soft_cap": None,
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _eos_token_ids(*files: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens of all files, in order, each once."""
    ids: dict[int, None] = {}
    for file in files:
        found = file.get("eos_token_id")
        for token in found if isinstance(found, list) else [found]:
            if isinstance(token, int):
                ids[token] = None
    return tuple(ids)


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(name, DTYPES, "float32")


def _checked(config: ModelConfig, fields: Fields) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        expected = f"a divisor of num_attention_heads {config.num_heads}"
        fields.fail("num_key_value_heads", expected, config.num_kv_heads)
    if config.head_dim % 2:
        fields.fail("head_dim", "even", config.head_dim)
    factors = {"short_factor": config.rope.short_factors, "long_factor": config.rope.long_factors}
    for name, given in factors.items():
        if config.rope.kind is RopeKind.LONGROPE and 2 * len(given) != config.rotary_dim:
            expected = f"a list of {config.rotary_dim // 2}, one for each pair that rope turns"
            fields.fail(f"rope_parameters: {name}", expected, f"{len(given)} numbers")
    return config


_READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
assert _READERS.keys() == ARCHITECTURES.keys()
