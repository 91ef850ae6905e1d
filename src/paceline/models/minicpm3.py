"""MiniCPM3 (model_type minicpm3): latent attention whose turned dimensions are halves, in layers
without experts, with multipliers on embeddings, on what each block adds and on logits."""

from typing import Any

from paceline.core.model.config import Multipliers
from paceline.models.architecture import Architecture
from paceline.models.config_latent import LATENT_DEFAULTS, latent_prenorm, read_latent
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    v_dim = hidden // fields.integer("num_attention_heads")
    base = fields.integer("dim_model_base", hidden)
    halves = fields.behind({"rope_interleave": False})  # its class knows of no other layout
    return read_latent(halves, v_dim=v_dim) | {
        "multipliers": Multipliers(
            embedding=fields.number("scale_emb", 1.0),
            residual=fields.number("scale_depth", layers**0.5) / layers**0.5,
            logit_divisor=hidden / base,
        ),
    }


_OWN = {name: value for name, value in LATENT_DEFAULTS.items() if name != "v_head_dim"}
ARCHITECTURE = Architecture(
    read=_read,
    build=latent_prenorm,
    defaults=_OWN
    | {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
    },
)
