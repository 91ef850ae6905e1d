"""DeepSeek-V3, R1 and kin (model_type deepseek_v3): V2 with experts that sigmoids and a bias
choose."""

from typing import Any

from paceline.models.architecture import Architecture
from paceline.models.config_latent import (
    LATENT_DEFAULTS,
    all_but_the_first,
    latent_prenorm,
    read_latent,
    read_sigmoid_experts,
)
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    experts = read_sigmoid_experts(fields, all_but_the_first(fields))
    return read_latent(fields) | {"moe": experts}


ARCHITECTURE = Architecture(
    read=_read,
    build=latent_prenorm,
    defaults=LATENT_DEFAULTS
    | {
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
    },
    names_experts=True,
    predicts="model.layers.{}.",
)
