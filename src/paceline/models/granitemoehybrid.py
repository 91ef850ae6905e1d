"""Granite 4 hybrids (model_type granitemoehybrid): Granite's multipliers, layers of Mamba-2 or of
attention, mostly without rope, and experts beside a feed-forward block that every token takes."""

from typing import TYPE_CHECKING, Any

from paceline.attention.linear.shape import MAMBA2
from paceline.core.model.config import ModelConfig, MoEConfig, Multipliers
from paceline.models.architecture import Architecture
from paceline.models.config_layers import with_layers
from paceline.models.config_mamba2 import read_mamba2, read_states
from paceline.models.config_moe import SILU, experts_per_token
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_windows import uniform_windows
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.layers.decoders.prenorm_layer import PreNormLayer
    from paceline.layers.weights.weight_format import Named
    from paceline.models.causal_lm import CausalLM

_RECURRENT, _ATTENDING = ("mamba", "linear_attention"), ("attention", "full_attention")


def _read(fields: Fields) -> dict[str, Any]:
    shared = read_prenorm(fields) | attention_biases(fields)
    shared |= {
        "layer_windows": uniform_windows(shared, None),
        "attention_scale": fields.number("attention_multiplier", 1.0),
    }
    if fields.get("position_embedding_type") in (None, "nope"):
        shared["unrotated_layers"] = tuple(range(shared["num_layers"]))
    else:
        fields.choice("position_embedding_type", ("nope", "rope"))
    inner = fields.integer("mamba_expand") * shared["hidden_size"]
    recurrent = read_states(fields, inner_size=inner)
    found = with_layers(shared)
    layers = [
        recurrent if kind in _RECURRENT else attending
        for kind, attending in zip(_layer_types(fields), found["layers"], strict=True)
    ]
    shared_size = fields.integer("shared_intermediate_size")
    return found | {
        "layers": tuple(layers),
        "intermediate_size": shared_size,
        "mamba2": read_mamba2(fields),
        "moe": _experts(fields, shared_size),
        "multipliers": Multipliers(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logit_divisor=fields.number("logits_scaling", 1.0),
        ),
    }


def _layer_types(fields: Fields) -> list[str]:
    """[num_layers]; a file that is silent has no attention."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or ["mamba"] * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        fields.fail("layer_types", f"a list of {num_layers} names", types)
    known = (*_RECURRENT, *_ATTENDING)
    for kind in types:
        if kind not in known:
            fields.fail("layer_types", f"made of {', '.join(known)}", kind)
    return types


def _experts(fields: Fields, shared_size: int) -> MoEConfig | None:
    count = fields.integer("num_local_experts", minimum=0)
    if count == 0:
        return None
    fields.choice("hidden_act", SILU, "silu")
    return MoEConfig(
        layers=(True,) * fields.integer("num_hidden_layers"),
        num_experts=count,
        experts_per_token=experts_per_token(fields),
        intermediate_size=fields.integer("intermediate_size"),
        renormalize=True,
        bias=False,
        shared_size=shared_size,
        shared_gate=False,
    )


def _build(config: ModelConfig, **where: Any) -> "CausalLM":
    from paceline.layers.mixers.mamba2 import Mamba2
    from paceline.models.prenorm import build_prenorm

    return build_prenorm(config, mixers={MAMBA2: Mamba2}, named=_name_layer, **where)


def _name_layer(layer: "PreNormLayer", prefix: str) -> "Named":
    from paceline.layers.mixers.mamba2 import Mamba2
    from paceline.layers.mixers.self_attention import SelfAttention
    from paceline.layers.moe import SparseMLP
    from paceline.layers.rank_sum import part_of
    from paceline.models.tensor_names import (
        name_attention,
        name_fused_mlp,
        name_mamba2,
        name_prenorms,
        name_routed,
    )

    block, mixer = part_of(layer.mlp), layer.attention
    named = name_prenorms(layer, prefix)
    if isinstance(mixer, SelfAttention):
        named |= name_attention(mixer, f"{prefix}.self_attn")
    else:
        assert isinstance(mixer, Mamba2)
        named |= name_mamba2(mixer, f"{prefix}.mamba")
    if isinstance(block, SparseMLP):
        assert block.shared is not None, "an expert that every token takes"
        named |= name_routed(block, f"{prefix}.mlp")
        block = block.shared.mlp
    return named | name_fused_mlp(block, f"{prefix}.shared_mlp")


ARCHITECTURE = Architecture(
    read=_read,
    build=_build,
    defaults={
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    renamed=(
        (".block_sparse_moe.router.layer.", ".mlp.gate."),
        (".block_sparse_moe.", ".mlp."),
    ),
    names_experts=True,
)
