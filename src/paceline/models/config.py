"""config.json and generation_config.json -> ModelConfig.  Imports no torch.

What a file asks for and we do not do is refused by name.  Defaults are those of the model's own
configuration class in transformers, because released files leave them out (Gemma 3 above all).
"""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.activations import ACTIVATIONS
from paceline.core.errors import ModelError, message
from paceline.core.model_config import ModelConfig
from paceline.core.options import DTYPES
from paceline.models.config_rope import LAYER_TYPES, context_limit, read_dual_rope, read_rope
from paceline.models.fields import Fields
from paceline.models.registry import ARCHITECTURES


def parse_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The model's shape.  End tokens of both files count.

    Raises ModelError for an unknown model_type or an unsupported feature.
    """
    text = _text_config(config)
    fields = Fields(text)
    fields.refuse("quantization_config", "use an unquantised checkpoint")
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
    parsed = _READERS[model_type](fields)
    common = {
        "model_type": model_type,
        "eos_token_ids": _eos_token_ids(text, generation_config or {}),
        "dtype": _dtype(fields),
    }
    return _checked(ModelConfig(**common, **parsed), fields)


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
        "layer_windows": _windows(fields, window=None, default=lambda _: False),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    return _prenorm(fields) | {
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "layer_windows": _upper_windows(fields),
    }


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return _prenorm(fields, head_dim=128) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": False,
        "layer_windows": _upper_windows(fields),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    pattern = fields.integer("sliding_window_pattern", 6)
    windows = _windows(
        fields,
        window=fields.integer("sliding_window", 4096),
        default=lambda layer: (layer + 1) % pattern != 0,
    )
    full, sliding = read_dual_rope(fields, full_theta=1_000_000.0, sliding_theta=10_000.0)
    differs = sliding != full and any(window is not None for window in windows)
    bias = fields.flag("attention_bias", False)
    head_dim = fields.integer("head_dim", 256)
    return {
        "vocab_size": fields.integer("vocab_size", 262_208),
        "hidden_size": fields.integer("hidden_size", 2304),
        "intermediate_size": fields.integer("intermediate_size", 9216),
        "num_layers": fields.integer("num_hidden_layers", 26),
        "num_heads": fields.integer("num_attention_heads", 8),
        "num_kv_heads": fields.integer("num_key_value_heads", 4),
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "max_position": context_limit(full, fields.integer("max_position_embeddings", 131_072)),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": full,
        "rope_local": sliding if differs else None,
        "layer_windows": windows,
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_soft_cap": fields.number("attn_logit_softcapping", None),
        "logit_soft_cap": fields.number("final_logit_softcapping", None),
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": False,
        "hidden_act": fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
    }


def _prenorm(fields: Fields, head_dim: int | None = None) -> dict[str, Any]:
    """Fields that Llama and Qwen spell alike."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", head_dim or hidden // heads)
    rope = read_rope(fields)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": dim,
        "v_head_dim": dim,
        "max_position": context_limit(rope, fields.integer("max_position_embeddings")),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "rope_local": None,
        "attention_scale": dim**-0.5,
        "attention_soft_cap": None,
        "logit_soft_cap": None,
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _upper_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen: with use_sliding_window, layers from max_window_layers on have the window."""
    if not fields.flag("use_sliding_window", False):
        return _windows(fields, window=None, default=lambda _: False)
    first = fields.integer("max_window_layers", 28, minimum=0)
    window = fields.integer("sliding_window", 4096)
    return _windows(fields, window=window, default=lambda layer: layer >= first)


def _windows(
    fields: Fields, *, window: int | None, default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """[num_layers] keys visible, itself included: the same count as Hugging Face's, whose mask is
    key > query - sliding_window.  `default` says which layers slide when layer_types is absent."""
    num_layers = fields.integer("num_hidden_layers", 26)
    types = fields.get("layer_types")
    if types is None:
        types = [LAYER_TYPES[default(layer)] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        fields.fail("layer_types", f"a list of {num_layers} names", types)
    for kind in types:
        if kind not in LAYER_TYPES:
            expected = f"made of {', '.join(LAYER_TYPES)}"
            fields.fail("layer_types", expected, kind, remedy="this attention is not supported")
    if window is None and "sliding_attention" in types:
        fields.fail("sliding_window", "set for sliding_attention layers", None)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


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
    return config


_READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "gemma3_text": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
assert _READERS.keys() == ARCHITECTURES.keys()
