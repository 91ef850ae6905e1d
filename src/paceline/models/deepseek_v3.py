"""DeepSeek-V3, R1 and kin (model_type deepseek_v3): V2 with experts that sigmoids and a bias
choose."""

from typing import Any

from paceline.core.model_config import ExpertChoice
from paceline.models.architecture import Architecture
from paceline.models.config_latent import (
    LATENT_DEFAULTS,
    latent_prenorm,
    read_experts,
    read_groups,
    read_latent,
)
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    groups, chosen = read_groups(fields)
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    experts = read_experts(
        fields,
        renormalize=fields.flag("norm_topk_prob", True),
        choice=ExpertChoice(
            num_groups=groups,
            groups_per_token=chosen,
            best_of_group=2,
            sigmoid=True,
            biased=True,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
    )
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
)
