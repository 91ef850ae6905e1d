"""GLM-4.7-Flash and kin (model_type glm4_moe_lite): DeepSeek-V3 with a list of which layers have
experts."""

from typing import Any

from paceline.models.architecture import Architecture
from paceline.models.config_latent import (
    LATENT_DEFAULTS,
    latent_prenorm,
    read_latent,
    read_sigmoid_experts,
)
from paceline.models.fields import Fields

_KINDS = ("dense", "sparse")


def _read(fields: Fields) -> dict[str, Any]:
    num_layers, kinds = fields.integer("num_hidden_layers"), fields.get("mlp_layer_types")
    if kinds is None:
        kinds = [_KINDS[layer > 0] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {*_KINDS}:
        fields.fail("mlp_layer_types", f"a list of {num_layers} of {', '.join(_KINDS)}", kinds)
    experts = read_sigmoid_experts(fields, tuple(kind == "sparse" for kind in kinds))
    return read_latent(fields) | {"moe": experts}


ARCHITECTURE = Architecture(
    read=_read,
    build=latent_prenorm,
    defaults=LATENT_DEFAULTS
    | {
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
    },
    names_experts=True,
    predicts="model.layers.{}.",
)
