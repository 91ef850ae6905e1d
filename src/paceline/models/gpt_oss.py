"""gpt-oss (model_type gpt_oss): a pre-norm decoder with experts in every layer, biases and sinks,
and a window in every other layer, the first too."""

from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.model.config import MoEConfig, NormKind
from paceline.models.architecture import Architecture, prenorm
from paceline.models.config_moe import SILU, experts_per_token, num_experts
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_windows import read_windows
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.layers.decoders.prenorm_layer import PreNormLayer
    from paceline.layers.weights.weight_format import Named

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(fields: Fields) -> dict[str, Any]:
    # Where the file has no rope, its class takes this one.
    fields = fields.defaulting({"rope_theta": 150_000.0, "rope_parameters": _ROPE})
    window = fields.integer("sliding_window", None)
    shared = read_prenorm(fields)
    fields.choice("hidden_act", SILU, "silu")
    return shared | {
        **attention_biases(fields, default=True),
        "layer_windows": read_windows(fields, window=window, default=lambda layer: layer % 2 == 0),
        "attention_sinks": True,
        "norm": NormKind.WIDE,
        "moe": MoEConfig(
            layers=(True,) * shared["num_layers"],
            num_experts=num_experts(fields),
            experts_per_token=experts_per_token(fields),
            intermediate_size=shared["intermediate_size"],
            renormalize=True,
            bias=True,
            swiglu_alpha=fields.number("swiglu_alpha"),
            swiglu_limit=fields.number("swiglu_limit"),
            swiglu_up_offset=1.0,
        ),
    }


def _stacked(layer: "PreNormLayer", prefix: str) -> "Named":
    """One tensor for all experts."""
    from paceline.layers.mixers.self_attention import SelfAttention
    from paceline.layers.rank_sum import part_of
    from paceline.models.tensor_names import name_attention, name_linear, name_prenorms

    mlp, experts = part_of(layer.mlp), f"{prefix}.mlp.experts"
    assert isinstance(layer.attention, SelfAttention)
    return {
        **name_attention(layer.attention, f"{prefix}.self_attn"),
        **name_linear(mlp.router, f"{prefix}.mlp.router"),
        **mlp.held.fill(f"{experts}.gate_up_proj", f"{experts}.down_proj"),
        **name_prenorms(layer, prefix),
    }


ARCHITECTURE = Architecture(
    read=_read,
    build=partial(prenorm, named=_stacked),
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
