"""Mamba-2 (model_type mamba2): layers that keep states and nothing else, each norm and mixer."""

from typing import TYPE_CHECKING, Any

from paceline.attention.linear.shape import MAMBA2
from paceline.core.model.config import ModelConfig
from paceline.models.architecture import Architecture
from paceline.models.config_mamba2 import Mamba2Names, read_mamba2, read_states
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.layers.decoders.mixer_layer import MixerLayer
    from paceline.layers.weights.weight_format import Named
    from paceline.models.causal_lm import CausalLM

_NAMES = Mamba2Names(
    num_heads="num_heads",
    head_dim="head_dim",
    state_size="state_size",
    num_groups="n_groups",
    conv_width="conv_kernel",
    conv_bias="use_conv_bias",
    in_bias="use_bias",
)
# A state stands for any number of tokens, and files say no limit: tables of requests have one.
_CONTEXT = 131_072


def _read(fields: Fields) -> dict[str, Any]:
    hidden = fields.integer("hidden_size")
    layer = read_states(fields, inner_size=fields.integer("expand") * hidden, names=_NAMES)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": 0,
        "max_position": fields.integer("max_position_embeddings", _CONTEXT),
        "rms_norm_eps": fields.number("layer_norm_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "mamba2": read_mamba2(fields, names=_NAMES),
        "layers": (layer,) * fields.integer("num_hidden_layers"),
    }


def _build(config: ModelConfig, **where: Any) -> "CausalLM":
    from paceline.layers.decoders.mixer_layer import MixerLayer
    from paceline.layers.mixers.mamba2 import Mamba2
    from paceline.models.prenorm import build_prenorm

    mixers = {MAMBA2: Mamba2}
    return build_prenorm(config, layer=MixerLayer, mixers=mixers, named=_name_layer, **where)


def _name_layer(layer: "MixerLayer", prefix: str) -> "Named":
    from paceline.layers.weights.weight_format import wholly
    from paceline.models.tensor_names import name_mamba2

    named = name_mamba2(layer.mixer, f"{prefix}.mixer")
    return named | {f"{prefix}.norm.weight": wholly(layer.norm.weight)}


ARCHITECTURE = Architecture(
    read=_read,
    build=_build,
    defaults={
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "vocab_size": 32768,
    },
    renamed=(
        ("backbone.embeddings.", "model.embed_tokens."),
        ("backbone.embedding.", "model.embed_tokens."),
        ("backbone.norm_f.", "model.norm."),
        ("backbone.", "model."),
    ),
)
