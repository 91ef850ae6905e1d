"""Llama 4, text only (model_type llama4_text, and the text_config of llama4): most layers see the
chunk of the context that a token lies in, every fourth sees all of it and has no rope; experts take
their input by its weight, beside one that every token takes."""

from dataclasses import replace
from typing import Any

from paceline.core.model.config import ExpertChoice, MoEConfig, QKNorm, QueryGrowth
from paceline.core.model.lookback import Chunk
from paceline.models.architecture import COMPUTED, Architecture
from paceline.models.config_moe import SILU, num_experts
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_rope import LAYER_TYPES
from paceline.models.fields import Fields

_FULL, _CHUNKED = LAYER_TYPES[0], "chunked_attention"


def read(fields: Fields) -> dict[str, Any]:
    """Of the text model alone."""
    shared, every = read_prenorm(fields), fields.integer("no_rope_layer_interval")
    num_layers = shared["num_layers"]
    by_default = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    rotated = fields.get("no_rope_layers") or by_default  # 1: the layer has rope
    if (
        not isinstance(rotated, list)
        or len(rotated) < num_layers
        or any(each not in (0, 1) for each in rotated)
    ):
        fields.fail("no_rope_layers", f"a list of {num_layers} times 0 or 1", rotated)
    qk_norm = QKNorm.UNIT if fields.flag("use_qk_norm", True) else QKNorm.NONE
    if qk_norm is QKNorm.UNIT:  # behind the rotation, whose factor (yarn's) it takes away
        shared |= {"rope": replace(shared["rope"], attention_factor=1.0)}
    return shared | {
        **attention_biases(fields),
        "unrotated_layers": tuple(layer for layer in range(num_layers) if not rotated[layer]),
        "layer_windows": _chunks(fields, rotated[:num_layers], shared["max_position"]),
        "qk_norm": qk_norm,
        "query_growth": _growth(fields),
        "intermediate_size": fields.integer("intermediate_size_mlp"),
        "moe": _experts(fields, num_layers, inter=shared["intermediate_size"]),
    }


def _chunks(fields: Fields, rotated: list[int], max_position: int) -> tuple[Chunk | None, ...]:
    """[num_layers] those that have rope, unless the file names them; a chunk that no context
    exceeds is none."""
    types = fields.get("layer_types")
    if types is None:
        types = [_CHUNKED if has_rope else _FULL for has_rope in rotated]
    if (
        not isinstance(types, list)
        or len(types) != len(rotated)
        or any(each not in (_FULL, _CHUNKED) for each in types)
    ):
        expected = f"a list of {len(rotated)} times {_FULL} or {_CHUNKED}"
        fields.fail("layer_types", expected, types, remedy="this attention is not supported")
    size = fields.integer("attention_chunk_size", None)
    if size is None and _CHUNKED in types:
        fields.fail("attention_chunk_size", f"set for {_CHUNKED} layers", None)
    chunk = None if size is None or size >= max_position else Chunk(size)
    return tuple(chunk if kind == _CHUNKED else None for kind in types)


def _growth(fields: Fields) -> QueryGrowth | None:
    """Early files have a number in place of the flag."""
    is_tuned = fields.get("attn_temperature_tuning")
    if not isinstance(is_tuned, int):
        fields.fail("attn_temperature_tuning", "true or false", is_tuned)
    if not is_tuned:
        return None
    return QueryGrowth(every=fields.integer("floor_scale"), factor=fields.number("attn_scale"))


def _experts(fields: Fields, num_layers: int, *, inter: int) -> MoEConfig | None:
    fields.choice("hidden_act", SILU, "silu")
    step, given = fields.integer("interleave_moe_layer_step"), fields.get("moe_layers")
    layers = list(range(step - 1, num_layers, step)) if given is None else given
    known = range(num_layers)
    if not isinstance(layers, list) or any(type(x) is not int or x not in known for x in layers):
        fields.fail("moe_layers", f"a list of layers from 0 to {num_layers - 1}", layers)
    if fields.integer("num_experts_per_tok") != 1:
        remedy = "an input is scaled for one expert; other numbers are not supported"
        fields.fail("num_experts_per_tok", "1", fields.get("num_experts_per_tok"), remedy=remedy)
    if not layers:
        return None
    return MoEConfig(
        layers=tuple(layer in layers for layer in range(num_layers)),
        num_experts=num_experts(fields),
        experts_per_token=1,
        intermediate_size=inter,
        renormalize=False,
        bias=False,
        shared_size=inter,
        shared_gate=False,
        choice=ExpertChoice(sigmoid=True),
        weighs_input=True,
    )


def build(config: Any, **where: Any) -> Any:
    """where: as of `build_llama4`."""
    from paceline.models.llama4_stack import build_llama4

    return build_llama4(config, **where)


ARCHITECTURE = Architecture(
    read=read,
    build=build,
    text_of="llama4",
    defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    ignored=(*COMPUTED, r"^(model\.)?(vision_model|multi_modal_projector)\."),
    renamed=(
        (".feed_forward.", ".mlp."),
        (".mlp.router.", ".mlp.gate."),
        (".mlp.shared_expert.", ".mlp.shared_experts."),
    ),
    names_experts=True,
)
