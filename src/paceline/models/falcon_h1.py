"""Falcon-H1 (model_type falcon_h1): every layer attends and keeps a Mamba-2 state side by side, and
multiplies what goes in and comes out of each.

What is only ever multiplied again is multiplied once: the factors on keys and on the input of
attention are in the scale of its scores and in what it adds, those on the input of the mixer in
those on its projections.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.core.model.config import GateOrder, ModelConfig, Multipliers, SideMultipliers
from paceline.models.architecture import Architecture
from paceline.models.config_layers import with_layers
from paceline.models.config_mamba2 import read_mamba2, read_states
from paceline.models.config_prenorm import read_plain
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.layers.decoders.side_layer import SideLayer
    from paceline.layers.weights.weight_format import Named
    from paceline.models.causal_lm import CausalLM


def _read(fields: Fields) -> dict[str, Any]:
    found = read_plain(fields)
    into = fields.number("attention_in_multiplier", 1.0)
    if found["attention_bias"] and into != 1.0:
        fields.fail("attention_in_multiplier", "1.0 where attention has biases", into)
    found["attention_scale"] *= into**2 * fields.number("key_multiplier", 1.0)
    gate, down = _factors(fields, "mlp_multipliers", 2)
    inner = fields.integer("mamba_d_ssm", None)
    if inner is None:
        inner = fields.integer("mamba_expand") * found["hidden_size"]
    side, found = read_states(fields, inner_size=inner), with_layers(found)
    both = {"mixer": side.mixer, "state": side.state}
    return found | {
        "layers": tuple(replace(layer, **both) for layer in found["layers"]),
        "mamba2": read_mamba2(
            fields,
            out_bias=fields.flag("projectors_bias", False),
            order=_order(fields),
            scales=_scales(fields),
        ),
        "multipliers": Multipliers(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=1.0,
            logit_divisor=1.0 / fields.number("lm_head_multiplier", 1.0),
        ),
        "side_multipliers": SideMultipliers(
            attention=into * fields.number("attention_out_multiplier", 1.0),
            state=fields.number("ssm_out_multiplier", 1.0),
            gate=gate,
            down=down,
        ),
    }


def _factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """[count], all 1 where the file is silent."""
    if fields.get(name) is None:
        return (1.0,) * count
    factors = fields.numbers(name)
    if len(factors) != count:
        fields.fail(name, f"a list of {count} numbers", list(factors))
    return factors


def _scales(fields: Fields) -> tuple[float, float, float, float, float] | None:
    """Of z, x, B, C and dt, with that of what they are projected from."""
    into = fields.number("ssm_in_multiplier", 1.0)
    if fields.flag("mamba_proj_bias", False) and into != 1.0:
        fields.fail("ssm_in_multiplier", "1.0 where the projections have biases", into)
    z, x, b, c, dt = (into * factor for factor in _factors(fields, "ssm_multipliers", 5))
    return None if (z, x, b, c, dt) == (1.0,) * 5 else (z, x, b, c, dt)


def _order(fields: Fields) -> GateOrder:
    if not fields.flag("mamba_rms_norm", False):
        return GateOrder.GATE
    is_before = fields.flag("mamba_norm_before_gate", True)
    return GateOrder.NORM_GATE if is_before else GateOrder.GATE_NORM


def _build(config: ModelConfig, **where: Any) -> "CausalLM":
    from paceline.layers.decoders.side_layer import SideLayer
    from paceline.models.prenorm import build_prenorm

    return build_prenorm(config, layer=SideLayer, named=_name_layer, **where)


def _name_layer(layer: "SideLayer", prefix: str) -> "Named":
    from paceline.layers.weights.weight_format import wholly
    from paceline.models.tensor_names import name_attention, name_feed_forward, name_mamba2

    return {
        **name_attention(layer.attention, f"{prefix}.self_attn"),
        **name_mamba2(layer.mixer, f"{prefix}.mamba"),
        **name_feed_forward(layer.mlp, f"{prefix}.feed_forward"),
        f"{prefix}.input_layernorm.weight": wholly(layer.input_norm.weight),
        f"{prefix}.pre_ff_layernorm.weight": wholly(layer.mlp_norm.weight),
    }


ARCHITECTURE = Architecture(
    read=_read,
    build=_build,
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    renamed=(("final_layernorm.", "norm."),),
)
