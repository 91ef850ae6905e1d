"""config.json of the dense pre-norm models: Llama, Mistral, Phi and the Qwens."""

from typing import Any

from paceline.core.activations import ACTIVATIONS
from paceline.core.model_config import Multipliers, NormKind
from paceline.models.config_rope import context_limit, read_phi3_rope, read_rope
from paceline.models.config_windows import (
    read_windows,
    switched_window,
    uniform_windows,
    unless_reaching_all,
    upper_windows,
)
from paceline.models.fields import Fields


def read_llama(fields: Fields) -> dict[str, Any]:
    """Biases where the file asks for them."""
    return read_prenorm(fields) | {
        **attention_biases(fields),
        "mlp_bias": fields.flag("mlp_bias", False),
        "layer_windows": read_windows(fields, window=None, default=lambda _: False),
    }


def read_mistral(fields: Fields) -> dict[str, Any]:
    """One window for all layers, or for those that layer_types names, as in Ministral."""
    shared, window = read_prenorm(fields), fields.integer("sliding_window", None)
    windows = read_windows(fields, window=window, default=lambda _: window is not None)
    longest = shared["max_position"]
    windows = tuple(unless_reaching_all(each, longest) for each in windows)
    return shared | {"layer_windows": windows}


def read_phi3(fields: Fields) -> dict[str, Any]:
    """Longrope, over a part of each head; one window for all layers."""
    fields.refuse("layer_types", "phi3 has one kind of layer; use a model of another type")
    shared = read_prenorm(fields, partial_rope=True)
    window = fields.integer("sliding_window", None)
    return shared | {"layer_windows": uniform_windows(shared, window)}


def read_qwen2(fields: Fields) -> dict[str, Any]:
    """Biases on Q, K and V; a window in the upper layers."""
    return read_prenorm(fields) | {
        "attention_bias": True,
        "layer_windows": upper_windows(fields),
    }


def read_qwen3(fields: Fields) -> dict[str, Any]:
    """A head size of its own; a window in the upper layers."""
    return read_prenorm(fields) | {
        **attention_biases(fields),
        "layer_windows": upper_windows(fields),
    }


def read_granite(fields: Fields) -> dict[str, Any]:
    """Llama with multipliers."""
    return read_llama(fields) | {
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "multipliers": Multipliers(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logit_divisor=fields.number("logits_scaling", 1.0),
        ),
    }


def read_smollm3(fields: Fields) -> dict[str, Any]:
    """Llama with layers that have no rope, which have the window where one is switched on."""
    shared = read_llama(fields.without("layer_types"))
    num_layers, every = shared["num_layers"], fields.integer("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers")  # 1: the layer has rope
    if rotated is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or not {*rotated} <= {0, 1}:
        fields.fail("no_rope_layers", f"a list of {num_layers} times 0 or 1", rotated)
    plain = tuple(layer for layer in range(num_layers) if not rotated[layer])
    window = switched_window(fields)
    windows = read_windows(
        fields, window=window, default=lambda layer: window is not None and layer in plain
    )
    return shared | {"unrotated_layers": plain, "layer_windows": windows}


def read_olmo2(fields: Fields) -> dict[str, Any]:
    """Norms whose product is taken in float32."""
    fields.refuse("clip_qkv", "OLMo 2 has norms of Q and K in its place")
    shared = read_prenorm(fields)
    return shared | {
        **attention_biases(fields),
        "layer_windows": uniform_windows(shared, None),
        "norm": NormKind.WIDE,
    }


def attention_biases(fields: Fields, *, default: bool = False) -> dict[str, bool]:
    """Of files with one flag for all projections of attention."""
    bias = fields.flag("attention_bias", default)
    return {"attention_bias": bias, "attention_out_bias": bias}


def read_prenorm(fields: Fields, *, partial_rope: bool = False) -> dict[str, Any]:
    """Fields that all of them spell alike."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if heads > hidden:
        fields.fail("num_attention_heads", f"at most hidden_size {hidden}", heads)
    dim = fields.integer("head_dim", hidden // heads)
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
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "attention_scale": dim**-0.5,
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }
