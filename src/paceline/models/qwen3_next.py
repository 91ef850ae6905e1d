"""Qwen 3 Next (model_type qwen3_next): three layers of gated delta nets to each that attends, whose
heads have gates; experts, of which every token takes one; norms around zero."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.attention.linear.shape import GDN, LinearShape
from paceline.core.model.config import LayerSpec, ModelConfig, NormKind, QKNorm
from paceline.models.architecture import Architecture
from paceline.models.config_layers import with_layers
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_qwen import read_experts
from paceline.models.config_rope import read_partial_rope
from paceline.models.config_windows import uniform_windows
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.models.causal_lm import CausalLM

ATTENDS, LINEAR = "full_attention", "linear_attention"


def _read(fields: Fields) -> dict[str, Any]:
    shared = read_prenorm(fields, partial_rope=partial(read_partial_rope, share=0.25))
    experts = read_experts(fields)
    if experts is not None:
        size = fields.integer("shared_expert_intermediate_size")
        experts = replace(experts, shared_size=size)
    shape = _shape(fields)
    linear = LayerSpec(mixer=GDN, state=shape.parts)
    attending = with_layers(shared | {"layer_windows": uniform_windows(shared, None)})
    layers = zip(attending["layers"], _linear_layers(fields), strict=True)
    return attending | {
        **attention_biases(fields),
        "layers": tuple(linear if is_linear else spec for spec, is_linear in layers),
        "norm": NormKind.UNIT_OFFSET,
        "qk_norm": QKNorm.HEAD,
        "moe": experts,
    }


def _linear_layers(fields: Fields) -> tuple[bool, ...]:
    """[num_layers] which mix by linear attention: as layer_types says, or all but each
    full_attention_interval-th."""
    num = fields.integer("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        every = fields.integer("full_attention_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(num))
    if not isinstance(types, list) or len(types) != num or {*types} - {ATTENDS, LINEAR}:
        fields.fail("layer_types", f"a list of {num} of {ATTENDS} and {LINEAR}", types)
    return tuple(each == LINEAR for each in types)


def _shape(fields: Fields) -> LinearShape:
    keys, values = (fields.integer(f"linear_num_{of}_heads") for of in ("key", "value"))
    if values % keys:
        fields.fail("linear_num_value_heads", f"a multiple of the {keys} key heads", values)
    return LinearShape(
        key_heads=keys,
        value_heads=values,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim"),
    )


def _build(config: ModelConfig, **where: Any) -> "CausalLM":
    from paceline.layers.mixers.gated_delta import GatedDeltaNet
    from paceline.layers.mixers.self_attention import GatedAttention
    from paceline.models.prenorm import build_prenorm

    return build_prenorm(config, attention=GatedAttention, mixers={GDN: GatedDeltaNet}, **where)


ARCHITECTURE = Architecture(
    read=_read,
    build=_build,
    defaults={
        "intermediate_size": 5632,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    names_experts=True,
    predicts="mtp.",
)
