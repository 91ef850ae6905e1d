"""How config.json files of models with Mamba-2 layers are read, and what of them is refused."""

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.attention.linear.shape import LinearShape
from paceline.core.errors import ModelError
from paceline.core.model.cache_groups import cache_group_specs
from paceline.core.model.config import CacheKind, ModelConfig
from paceline.models.config import parse_config
from paceline.models.locate import locate

SHAPES = {
    "mamba2": "mamba2-2.7b",
    "granitemoehybrid": "granite-4.0-h-small",
    "falcon_h1": "falcon-h1-7b",
}


def read(model_type: str, **changed: Any) -> ModelConfig:
    """The shape of a model_type with fields changed; None: left out."""
    fields = locate(SHAPES[model_type]).config | changed
    return parse_config({name: value for name, value in fields.items() if value is not None})


def shape_of(config: ModelConfig) -> LinearShape:
    [parts] = {layer.state for layer in config.layers if layer.state}
    return LinearShape.of({part.name: part.shape for part in parts})


def test_groups_of_mamba2_are_states_alone() -> None:
    config = read("mamba2")
    [group] = cache_group_specs(config, 512)
    assert (group.kind, group.layer_ids) == (CacheKind.STATE, tuple(range(64)))
    assert group.page_bytes(2) == 64 * (80 * 128 * 64 * 4 + (5120 + 256) * 3 * 2) + 4
    assert not config.heads
    assert config.max_position == 131_072
    assert read("mamba2", max_position_embeddings=4096).max_position == 4096


def test_layers_of_granite_are_in_either_group_and_those_of_falcon_in_both() -> None:
    attending = (5, 15, 25, 35)
    rows, states = cache_group_specs(read("granitemoehybrid"), 16)
    assert (rows.kind, rows.layer_ids) == (CacheKind.TOKENS, attending)
    assert states.layer_ids == tuple(layer for layer in range(40) if layer not in attending)
    rows, states = cache_group_specs(read("falcon_h1"), 16)
    assert (rows.kind, states.kind) == (CacheKind.TOKENS, CacheKind.STATE)
    assert rows.layer_ids == states.layer_ids == tuple(range(44))
    assert (rows.mixer, states.mixer) == ("softmax", "mamba2")


def test_what_a_layer_attends_with_and_what_it_keeps_are_told_apart() -> None:
    layer = read("falcon_h1").layers[0]
    assert layer.attends
    assert [cached.kind for cached in layer.caches] == [CacheKind.TOKENS, CacheKind.STATE]
    alone = replace(read("mamba2").layers[0])
    assert not alone.attends
    assert [cached.kind for cached in alone.caches] == [CacheKind.STATE]
    windowed = replace(layer, window=64)
    assert [cached.window for cached in windowed.caches] == [64, None]


def test_the_shape_of_a_state_is_that_of_the_file() -> None:
    assert shape_of(read("mamba2")) == LinearShape(
        key_heads=1, value_heads=80, key_dim=128, value_dim=64, conv_width=4
    )
    divided = read("falcon_h1", mamba_d_head="auto", mamba_n_groups=2, mamba_d_conv=3)
    assert shape_of(divided) == LinearShape(
        key_heads=2, value_heads=24, key_dim=256, value_dim=128, conv_width=3
    )
    doubled = read("falcon_h1", mamba_d_ssm=6144, mamba_d_head="auto")
    assert shape_of(doubled).value_dim == 256


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (None, (0.0, math.inf)),
        ([0, math.inf], (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
    ],
)
def test_limits_of_the_time_step_are_read_as_they_are_spelled(given: Any, limits: Any) -> None:
    config = read("mamba2", time_step_limit=given)
    assert config.mamba2 is not None
    assert config.mamba2.step_limits == limits


def test_falcons_factors_are_multiplied_once() -> None:
    config = read("falcon_h1", attention_in_multiplier=0.5, attention_out_multiplier=3.0)
    key = locate(SHAPES["falcon_h1"]).config["key_multiplier"]
    assert config.layers[0].scale == pytest.approx(128**-0.5 * 0.25 * key)
    assert config.side_multipliers is not None
    assert config.side_multipliers.attention == pytest.approx(1.5)
    plain = {"ssm_multipliers": [1.0] * 5, "ssm_in_multiplier": 1.0}
    own, with_factors = read("falcon_h1", **plain).mamba2, config.mamba2
    assert own is not None
    assert with_factors is not None
    assert own.scales is None
    assert with_factors.scales is not None
    assert with_factors.scales[1] == pytest.approx(1.25 * 0.25)


@pytest.mark.parametrize(
    ("model_type", "changed", "text"),
    [
        (
            "mamba2",
            {"head_dim": 32},
            "head_dim must be such that 80 heads have the 5120 inner numbers of a token, got 32",
        ),
        ("mamba2", {"n_groups": 3}, "n_groups must be a divisor of num_heads 80, got 3"),
        ("mamba2", {"conv_kernel": 1}, "conv_kernel must be an integer of at least 2, got 1"),
        ("mamba2", {"hidden_act": "relu"}, "hidden_act must be one of silu, swish, got 'relu'"),
        ("mamba2", {"time_step_limit": [0.1]}, "time_step_limit must be a list of two numbers"),
        ("mamba2", {"time_step_limit": [0.2, 0.1]}, "the second larger, got"),
        ("mamba2", {"time_step_limit": 0.1}, "time_step_limit must be a list of two numbers"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types must be a list of 40 names"),
        (
            "granitemoehybrid",
            {"layer_types": ["sliding_attention"] * 40},
            "layer_types must be made of mamba, linear_attention, attention, full_attention, got "
            "'sliding_attention'",
        ),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type must be one of nope, rope, got 'alibi'",
        ),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers must be a list of 2 numbers"),
        (
            "falcon_h1",
            {"mamba_proj_bias": True},
            "ssm_in_multiplier must be 1.0 where the projections have biases, got 1.25",
        ),
        (
            "falcon_h1",
            {"attention_bias": True, "attention_in_multiplier": 2.0},
            "attention_in_multiplier must be 1.0 where attention has biases, got 2.0",
        ),
    ],
)
def test_what_is_not_such_a_model_is_refused(
    model_type: str, changed: dict[str, Any], text: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(model_type, **changed)
    assert text in str(caught.value)


def test_granites_layers_go_by_either_spelling_and_a_silent_file_has_no_attention() -> None:
    spelled = ["linear_attention" if at % 2 else "full_attention" for at in range(40)]
    config = read("granitemoehybrid", layer_types=spelled)
    assert [layer.attends for layer in config.layers] == [at % 2 == 0 for at in range(40)]
    assert not any(layer.attends for layer in read("granitemoehybrid", layer_types=None).layers)


def test_granites_attention_turns_where_the_file_says_rope() -> None:
    attending = read("granitemoehybrid").layers[5]
    assert attending.rope is None
    assert read("granitemoehybrid", position_embedding_type="rope").layers[5].rope is not None
