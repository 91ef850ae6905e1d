"""Phi-3, 3.5 and 4 (model_type phi3): Llama, whose checkpoints store Q, K, V and gate, up fused.

The longer contexts come with longrope; Phi-4-mini turns three quarters of each head.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.models.architecture import Architecture, prenorm
from paceline.models.config_prenorm import read_prenorm
from paceline.models.config_rope import read_phi3_rope
from paceline.models.config_windows import uniform_windows
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.layers.decoders.prenorm_layer import PreNormLayer
    from paceline.layers.weights.weight_format import Named


def _read(fields: Fields) -> dict[str, Any]:
    fields.refuse("layer_types", "phi3 has one kind of layer; use a model of another type")
    shared = read_prenorm(fields, partial_rope=read_phi3_rope)
    window = fields.integer("sliding_window", None)
    return shared | {"layer_windows": uniform_windows(shared, window)}


def _fused(layer: "PreNormLayer", prefix: str) -> "Named":
    """One tensor where we have one: rows of Q, K, V, and rows of gate, up, in our order."""
    from paceline.layers.mixers.self_attention import SelfAttention
    from paceline.layers.rank_sum import part_of
    from paceline.models.tensor_names import name_linear, name_prenorms

    mlp, attention = part_of(layer.mlp), layer.attention
    assert isinstance(attention, SelfAttention)
    return {
        **attention.qkv.held.fill(f"{prefix}.self_attn.qkv_proj"),
        **name_linear(part_of(attention.out), f"{prefix}.self_attn.o_proj"),
        **mlp.gate_up.held.fill(f"{prefix}.mlp.gate_up_proj"),
        **name_linear(mlp.down, f"{prefix}.mlp.down_proj"),
        **name_prenorms(layer, prefix),
    }


ARCHITECTURE = Architecture(
    read=_read,
    build=partial(prenorm, named=_fused),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
)
