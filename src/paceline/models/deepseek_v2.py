"""DeepSeek-V2 and V2-Lite (model_type deepseek_v2): latent attention, experts in groups that
softmax scores choose, and shared experts."""

from typing import Any

from paceline.core.model.config import ExpertChoice
from paceline.models.architecture import Architecture
from paceline.models.config_latent import (
    LATENT_DEFAULTS,
    all_but_the_first,
    latent_prenorm,
    read_experts,
    read_groups,
    read_latent,
)
from paceline.models.fields import Fields

_METHODS = ("greedy", "group_limited_greedy")


def _read(fields: Fields) -> dict[str, Any]:
    method = fields.choice("topk_method", _METHODS, "greedy")
    groups, chosen = read_groups(fields) if method == _METHODS[1] else (1, 1)
    scale = fields.number("routed_scaling_factor", 1.0)
    is_plain = groups == 1 and scale == 1.0
    if fields.flag("norm_topk_prob", False):
        fields.fail("norm_topk_prob", "false: weights of DeepSeek-V2 are the softmax's own", True)
    fields.choice("scoring_func", ("softmax",), "softmax")
    experts = read_experts(
        fields,
        all_but_the_first(fields),
        renormalize=False,
        choice=None
        if is_plain
        else ExpertChoice(num_groups=groups, groups_per_token=chosen, scale=scale),
    )
    return read_latent(fields) | {"moe": experts}


ARCHITECTURE = Architecture(
    read=_read,
    build=latent_prenorm,
    defaults=LATENT_DEFAULTS
    | {
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    names_experts=True,
)
