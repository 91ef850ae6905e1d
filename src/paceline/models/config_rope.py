"""Rope parameters of a config.json, in both spellings, as RopeConfig.

`dynamic` is the plain rope up to max_position_embeddings, which is as far as we serve it.
transformers 5 writes `rope_parameters`, flat or per attention type; older files have `rope_theta`
and `rope_scaling` (whose type is under `rope_type` or `type`), and Gemma 3 `rope_local_base_freq`.
Phi-3 has called longrope "su" and "yarn" too.
"""

from collections.abc import Mapping
from typing import Any

from paceline.core.model.rope import RopeConfig, RopeKind
from paceline.models.fields import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")

_KNOWN_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"),
    *("partial_rotary_factor", "finetuned", "short_factor", "long_factor"),
}
_NEUTRAL_AT_ONE = (
    "attn_factor",
    "extrapolation_factor",
)  # other engines' yarn, as they are released
_DYNAMIC = "dynamic"
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"


def read_rope(fields: Fields, *, default_theta: float = 10000.0) -> RopeConfig:
    """The one rope of a model whose layers share it, over the whole head."""
    params = _shared(fields)
    theta = fields.number("rope_theta", default_theta)
    _refuse_partial(fields, params, where="rope_parameters")
    return _rope(fields, params, theta=theta, where="rope_parameters")


def read_partial_rope(
    fields: Fields, head_dim: int, *, share: float = 1.0
) -> tuple[RopeConfig, int]:
    """(the rope of all layers, how many leading dimensions of a head it turns).

    share: of them, where the file is silent.
    """
    return _partial(fields.behind({_PARTIAL: share}), _shared(fields), head_dim)


def read_phi3_rope(fields: Fields, head_dim: int) -> tuple[RopeConfig, int]:
    """The same, with Phi-3's names of longrope."""
    params = _shared(fields)
    for spelling in ("rope_type", "type"):
        if params.get(spelling) in ("su", "yarn"):
            params = {**params, spelling: "longrope"}
    return _partial(fields, params, head_dim)


def _partial(fields: Fields, params: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, int]:
    own = Fields(params, "config.json: rope_parameters")
    share = own.number(_PARTIAL, fields.number(_PARTIAL, 1.0))
    rotary_dim = int(head_dim * share)
    if share > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        own.fail(_PARTIAL, f"an even number of the {head_dim} dimensions of a head", share)
    theta = fields.number("rope_theta", 10000.0)
    return _rope(fields, params, theta=theta, where="rope_parameters"), rotary_dim


def read_dual_rope(
    fields: Fields, *, full_theta: float, sliding_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """(full, sliding) of a model with a rope per attention type; classic scaling is full's only.

    The outer original_max_position_embeddings counts for neither, as in transformers.
    """
    fields = fields.without(_ORIGINAL)
    params = fields.nested("rope_parameters")
    for name, value in params.items():
        if name not in LAYER_TYPES or not isinstance(value, dict):
            expected = f"one object for each of {', '.join(LAYER_TYPES)}"
            fields.fail("rope_parameters", expected, params)
    full = params.get("full_attention", {}) | fields.nested("rope_scaling")
    sliding = params.get("sliding_attention", {})

    def rope(params: Mapping[str, Any], theta: float, name: str) -> RopeConfig:
        where = f"rope_parameters.{name}"
        _refuse_partial(fields, params, where=where)
        return _rope(fields, params, theta=theta, where=where)

    return (
        rope(full, fields.number("rope_theta", full_theta), "full_attention"),
        rope(sliding, fields.number("rope_local_base_freq", sliding_theta), "sliding_attention"),
    )


def context_limit(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The context limit; yarn extends its original context to factor times it, whether or not
    max_position_embeddings was raised with it (Qwen's model cards ask for the former only)."""
    if rope.kind is not RopeKind.YARN or rope.original_max_position is None:
        return max_position_embeddings
    return max(max_position_embeddings, int(rope.factor * rope.original_max_position))


def _shared(fields: Fields) -> Mapping[str, Any]:
    params = fields.nested("rope_scaling") or fields.nested("rope_parameters")
    if any(isinstance(value, dict) for value in params.values()):
        fields.fail("rope_parameters", "one set for all layers", params)
    return params


def _refuse_partial(fields: Fields, params: Mapping[str, Any], *, where: str) -> None:
    own = Fields(params, f"config.json: {where}")
    share = own.number(_PARTIAL, fields.number(_PARTIAL, 1.0))
    if share != 1.0:
        remedy = "only rope over the whole head is supported"
        own.fail(_PARTIAL, "1.0", share, remedy=remedy)


def _rope(fields: Fields, params: Mapping[str, Any], *, theta: float, where: str) -> RopeConfig:
    own = Fields(params, f"config.json: {where}")
    neutral = {name for name in _NEUTRAL_AT_ONE if params.get(name) == 1.0}
    unknown = sorted(set(params) - _KNOWN_KEYS - neutral)
    if unknown:
        own.fail(unknown[0], "absent", params[unknown[0]], remedy="this rope is not supported")
    kinds = (*(kind.value for kind in RopeKind), _DYNAMIC)
    spelling = "rope_type" if own.get("rope_type") is not None else "type"
    name = own.choice(spelling, kinds, default="default")
    theta = own.number("rope_theta", theta)
    if name == _DYNAMIC:
        # Longer requests turn at another rate: max_position_embeddings is the limit we serve.
        own.number("factor")
        return RopeConfig(theta=theta)
    kind = RopeKind(name)
    match kind:
        case RopeKind.DEFAULT:
            return RopeConfig(theta=theta)
        case RopeKind.LINEAR:
            return RopeConfig(kind=kind, theta=theta, factor=own.number("factor"))
        case RopeKind.LLAMA3:
            return _llama3(fields, own, theta)
        case RopeKind.YARN:
            return _yarn(fields, own, theta)
        case RopeKind.LONGROPE:
            return _longrope(fields, own, theta)


def _llama3(fields: Fields, own: Fields, theta: float) -> RopeConfig:
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    if high < low:  # equal ones are a step: Llama 4
        own.fail("high_freq_factor", f"at least low_freq_factor {low}", high)
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


def _longrope(fields: Fields, own: Fields, theta: float) -> RopeConfig:
    outer = fields.integer(_ORIGINAL, None, minimum=2)
    original = own.integer(_ORIGINAL, minimum=2) if outer is None else outer
    return RopeConfig(
        kind=RopeKind.LONGROPE,
        theta=theta,
        factor=own.number("factor", fields.integer("max_position_embeddings") / original),
        original_max_position=original,
        attention_factor=own.number("attention_factor", None),
        short_factors=own.numbers("short_factor"),
        long_factors=own.numbers("long_factor"),
    )


def _original(fields: Fields, own: Fields) -> int:
    """The trained context: the one beside the rope object comes first, as in transformers."""
    inner = own.integer(_ORIGINAL, fields.integer("max_position_embeddings"))
    original: int = fields.integer(_ORIGINAL, inner)
    return original
