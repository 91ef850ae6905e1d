"""Mixtral (model_type mixtral): Mistral with experts in place of every feed-forward block."""

from typing import Any

from paceline.core.model.config import MoEConfig
from paceline.models.architecture import Architecture
from paceline.models.config_moe import SILU, experts_per_token, num_experts
from paceline.models.config_prenorm import read_prenorm
from paceline.models.config_windows import uniform_windows
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.refuse("layer_types", "mixtral has one kind of layer; use a model of another type")
    shared, window = read_prenorm(fields), fields.integer("sliding_window", None)
    fields.choice("hidden_act", SILU, "silu")
    experts = MoEConfig(
        layers=(True,) * shared["num_layers"],
        num_experts=num_experts(fields),
        experts_per_token=experts_per_token(fields),
        intermediate_size=shared["intermediate_size"],
        renormalize=True,
        bias=False,
    )
    return shared | {"layer_windows": uniform_windows(shared, window), "moe": experts}


ARCHITECTURE = Architecture(
    read=_read,
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    renamed=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.weight", ".gate_proj.weight"),
        (".w2.weight", ".down_proj.weight"),
        (".w3.weight", ".up_proj.weight"),
    ),
    names_experts=True,
)
