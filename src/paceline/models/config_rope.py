"""Rope parameters of a config.json, in both spellings, as RopeConfig.

transformers 5 writes `rope_parameters`, flat or per attention type; older files have `rope_theta`
and `rope_scaling` (whose type is under `rope_type` or `type`), and Gemma 3 `rope_local_base_freq`.
"""

from collections.abc import Mapping
from typing import Any

from paceline.core.model_config import RopeConfig, RopeKind
from paceline.models.fields import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")

_KNOWN_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    *("partial_rotary_factor", "finetuned"),
}


def read_rope(fields: Fields, *, default_theta: float = 10000.0) -> RopeConfig:
    """The one rope of a model whose layers share it."""
    params = fields.nested("rope_scaling") or fields.nested("rope_parameters")
    if any(isinstance(value, dict) for value in params.values()):
        fields.fail("rope_parameters", "one set for all layers", params)
    theta = fields.number("rope_theta", default_theta)
    return _rope(fields, params, theta=theta, where="rope_parameters")


def read_dual_rope(
    fields: Fields, *, full_theta: float, sliding_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """(full, sliding) of a model with a rope per attention type; classic scaling is full's only."""
    params = fields.nested("rope_parameters")
    for name, value in params.items():
        if name not in LAYER_TYPES or not isinstance(value, dict):
            expected = f"one object for each of {', '.join(LAYER_TYPES)}"
            fields.fail("rope_parameters", expected, params)
    full = params.get("full_attention", {}) | fields.nested("rope_scaling")
    full_theta = fields.number("rope_theta", full_theta)
    sliding_theta = fields.number("rope_local_base_freq", sliding_theta)
    return (
        _rope(fields, full, theta=full_theta, where="rope_parameters.full_attention"),
        _rope(
            fields,
            params.get("sliding_attention", {}),
            theta=sliding_theta,
            where="rope_parameters.sliding_attention",
        ),
    )


def context_limit(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The context limit; yarn extends its original context to factor times it, whether or not
    max_position_embeddings was raised with it (Qwen's model cards ask for the former only)."""
    if rope.kind is not RopeKind.YARN or rope.original_max_position is None:
        return max_position_embeddings
    return max(max_position_embeddings, int(rope.factor * rope.original_max_position))


def _rope(fields: Fields, params: Mapping[str, Any], *, theta: float, where: str) -> RopeConfig:
    own = Fields(params, f"config.json: {where}")
    unknown = sorted(set(params) - _KNOWN_KEYS)
    if unknown:
        own.fail(unknown[0], "absent", params[unknown[0]], remedy="this rope is not supported")
    if own.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        own.fail(
            "partial_rotary_factor",
            "1.0",
            own.get("partial_rotary_factor") or fields.get("partial_rotary_factor"),
            remedy="only rope over the whole head is supported",
        )
    kinds = tuple(kind.value for kind in RopeKind)
    spelling = "rope_type" if own.get("rope_type") is not None else "type"
    kind = RopeKind(own.choice(spelling, kinds, default="default"))
    theta = own.number("rope_theta", theta)
    match kind:
        case RopeKind.DEFAULT:
            return RopeConfig(theta=theta)
        case RopeKind.LINEAR:
            return RopeConfig(kind=kind, theta=theta, factor=own.number("factor"))
        case RopeKind.LLAMA3:
            return _llama3(fields, own, theta)
        case RopeKind.YARN:
            return _yarn(fields, own, theta)


def _llama3(fields: Fields, own: Fields, theta: float) -> RopeConfig:
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high <= low:
        own.fail("high_freq_factor", f"above low_freq_factor {low}", high)
    return RopeConfig(
        kind=RopeKind.LLAMA3,
        theta=theta,
        factor=own.number("factor"),
        original_max_position=_original(fields, own),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(fields: Fields, own: Fields, theta: float) -> RopeConfig:
    original = _original(fields, own)
    return RopeConfig(
        kind=RopeKind.YARN,
        theta=theta,
        factor=own.number("factor", fields.integer("max_position_embeddings") / original),
        original_max_position=original,
        beta_fast=own.number("beta_fast", 32.0),
        beta_slow=own.number("beta_slow", 1.0),
        mscale=own.number("mscale", None),
        mscale_all_dim=own.number("mscale_all_dim", None),
        attention_factor=own.number("attention_factor", None),
        truncate=own.flag("truncate", True),
    )


def _original(fields: Fields, own: Fields) -> int:
    name = "original_max_position_embeddings"
    fallback = fields.integer("max_position_embeddings")
    original: int = own.integer(name, fields.integer(name, fallback))
    return original
