"""What config.json files of models with Mamba-2 layers have in common."""

import math
from typing import NamedTuple

from paceline.attention.linear.shape import MAMBA2, LinearShape
from paceline.core.model.config import GateOrder, LayerSpec, Mamba2Config
from paceline.models.config_moe import SILU
from paceline.models.fields import Fields


class Mamba2Names(NamedTuple):
    """What a file calls them."""

    num_heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    state_size: str = "mamba_d_state"
    num_groups: str = "mamba_n_groups"
    conv_width: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    in_bias: str = "mamba_proj_bias"


_INFINITE = {"__float__": "Infinity"}
BESIDE = Mamba2Names()  # of models that attend, too


def read_states(fields: Fields, *, inner_size: int, names: Mamba2Names = BESIDE) -> LayerSpec:
    """A layer that keeps a state and does not attend.  inner_size: of x, over all heads."""
    heads = fields.integer(names.num_heads)
    if fields.get(names.head_dim) == "auto":
        fields = fields.without(names.head_dim).behind({names.head_dim: inner_size // heads})
    head_dim, groups = fields.integer(names.head_dim), fields.integer(names.num_groups)
    if heads * head_dim != inner_size:
        expected = f"such that {heads} heads have the {inner_size} inner numbers of a token"
        fields.fail(names.head_dim, expected, head_dim)
    if heads % groups:
        fields.fail(names.num_groups, f"a divisor of {names.num_heads} {heads}", groups)
    shape = LinearShape(
        key_heads=groups,
        value_heads=heads,
        key_dim=fields.integer(names.state_size),
        value_dim=head_dim,
        conv_width=fields.integer(names.conv_width, minimum=2),
    )
    return LayerSpec(mixer=MAMBA2, state=shape.parts)


def read_mamba2(
    fields: Fields,
    *,
    out_bias: bool | None = None,
    names: Mamba2Names = BESIDE,
    order: GateOrder = GateOrder.GATE_NORM,
    scales: tuple[float, float, float, float, float] | None = None,
) -> Mamba2Config:
    """out_bias: None: as of the projection in."""
    fields.choice("hidden_act", SILU, "silu")
    in_bias = fields.flag(names.in_bias, False)
    return Mamba2Config(
        conv_bias=fields.flag(names.conv_bias, True),
        in_bias=in_bias,
        out_bias=in_bias if out_bias is None else out_bias,
        step_limits=_step_limits(fields),
        order=order,
        scales=scales,
    )


def _step_limits(fields: Fields) -> tuple[float, float]:
    """JSON has no infinity: files spell it as Python does, transformers 5 as an object."""
    given = fields.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    expected = "a list of two numbers from 0 on, the second larger"
    listed = given if isinstance(given, (list, tuple)) else ()
    limits = [math.inf if limit == _INFINITE else limit for limit in listed]
    is_pair = len(limits) == 2 and all(type(limit) in (int, float) for limit in limits)
    if not is_pair or not 0.0 <= limits[0] < limits[1]:
        fields.fail("time_step_limit", expected, given)
    return float(limits[0]), float(limits[1])
