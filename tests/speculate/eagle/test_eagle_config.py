"""A head's config.json is read as released heads have it, or refused by the field's name."""

from dataclasses import replace
from typing import Any

import eagle_checkpoints as heads
import pytest

from paceline.core.errors import ConfigError, ModelError
from paceline.core.model.config import ModelConfig
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.speculate.eagle.config import (
    EagleConfig,
    eagle_mismatches,
    parse_eagle_config,
    require_match,
    tap_names,
)

IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3(**changes: Any) -> EagleConfig:
    return parse_eagle_config(heads.EAGLE3 | changes, "EAGLE3")


def target(layers: int = 32, **changes: Any) -> ModelConfig:
    raw = heads.HEAD | {"num_hidden_layers": layers, "max_position_embeddings": 64} | changes
    return parse_config(raw)


def test_an_eagle1_head_reads_the_final_hidden_state_and_has_a_bias_by_default() -> None:
    config = parse_eagle_config(heads.HEAD, "EAGLE")
    assert (config.version, config.num_taps, config.draft_vocab_size) == (1, 1, None)
    assert (config.fc_bias, config.has_own_embedding) == (True, False)
    assert tap_names(config, target()) == ("final",)


def test_an_eagle3_head_reads_three_taps_and_has_its_own_vocabulary() -> None:
    config = eagle3()
    assert (config.version, config.num_taps, config.draft_vocab_size) == (3, 3, heads.DRAFT_VOCAB)
    assert not any((config.fc_bias, config.has_own_embedding, config.fc_norm, config.norm_output))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(32, (1, 15, 28)), (28, (1, 13, 24)), (12, (1, 5, 8)), (7, (1, 2, 3)), (80, (1, 39, 76))],
)
def test_default_taps_are_the_outputs_before_layers_2_half_and_three_from_the_end(
    layers: int, expected: tuple[int, ...]
) -> None:
    assert tap_names(eagle3(), target(layers)) == tuple(f"layer.{i}" for i in expected)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_explicit_taps_are_the_layers_whose_output_is_wanted(where: str) -> None:
    ids = {IDS: [2, 16, 29, 31]}
    config = eagle3(**({"eagle_config": ids} if where == "inside" else ids))
    assert config.num_taps == 4
    assert tap_names(config, target()) == ("layer.2", "layer.16", "layer.29", "layer.31")


def test_without_auxiliary_states_the_final_hidden_state_is_the_tap() -> None:
    config = eagle3(eagle_config={"use_aux_hidden_state": False})
    assert (config.num_taps, config.fuses_taps) == (1, False)
    assert tap_names(config, target()) == ("final",)


def test_a_head_of_another_width_has_its_own_embedding() -> None:
    config = eagle3(hidden_size=32, target_hidden_size=48)
    assert config.has_own_embedding
    assert (config.hidden_size, config.tap_width) == (32, 144)


@pytest.mark.parametrize("name", ["fc_norm", "use_aux_norm"])
def test_both_spellings_of_the_norm_before_fc_are_read(name: str) -> None:
    assert eagle3(**{name: True}).fc_norm


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"draft_vocab_size": 97}, r"draft_vocab_size must be at most vocab_size 96, got 97"),
        ({"draft_vocab_size": None, "target_hidden_size": 64}, r"draft_vocab_size must be given"),
        ({"norm_before_fc": True}, r"norm_before_fc must be absent, got True; one norm over all"),
        ({"model_type": "gemma2"}, r"model_type must be one of llama, mistral, qwen2, qwen3, got"),
        ({"quantization_config": {"bits": 4}}, r"use an unquantised draft head"),
        ({"speculators_model_type": "eagle3"}, r"use a head in the format of LlamaForCausalLMEagl"),
        ({IDS: [1, -2, 3]}, r"layer_ids must be a list of layers, counted from 0, got \[1, -2, 3"),
        ({IDS: "all"}, r"layer_ids must be a list of layers, counted from 0, got 'all'"),
        ({IDS: 0}, r"layer_ids must be a list of layers, counted from 0, got 0"),
        ({"architectures": 7}, r"architectures must be a list of names, got 7"),
        ({IDS: [1, 2], "num_aux_hidden_states": 3}, r"num_aux_hidden_states must be 2, the number"),
        ({"num_aux_hidden_states": 5}, r"num_aux_hidden_states must be 3 unless eagle_aux.*got 5"),
        (
            {"eagle_config": {"use_aux_hidden_state": False, IDS: [1, 2, 3]}},
            r"layer_ids must be absent where use_aux_hidden_state is false, got \[1, 2, 3\]",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}, "fc_norm": True},
            r"fc_norm must be false for a head without fc, got True",
        ),
        ({"num_attention_heads": 3}, r"num_key_value_heads must be a divisor"),
        ({"fc_norm": "yes"}, r"fc_norm must be true or false, got 'yes'"),
    ],
)
def test_a_wrong_field_of_an_eagle3_head_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        eagle3(**changes)


def test_an_eagle1_head_of_another_width_is_refused() -> None:
    with pytest.raises(ModelError, match=r"target_hidden_size must be hidden_size 48.*got 64"):
        parse_eagle_config(heads.HEAD | {"target_hidden_size": 64}, "EAGLE")


@pytest.mark.parametrize("mark", [{"draft_vocab_size": 40}, {"architectures": ["XEagle3"]}])
def test_an_eagle3_head_is_not_taken_for_an_eagle1_head(mark: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"must be EAGLE3, which.*got EAGLE; pass --speculative-algorithm EAGLE3"
    ):
        parse_eagle_config(heads.HEAD | mark, "EAGLE")


def test_an_eagle1_head_is_not_taken_for_an_eagle3_head() -> None:
    raw = heads.HEAD | {"architectures": ["LlamaForCausalLMEagle"]}
    with pytest.raises(
        ConfigError, match=r"speculative_algorithm must be EAGLE, which.*got EAGLE3"
    ):
        parse_eagle_config(raw, "EAGLE3")


def test_a_matching_target_has_no_mismatches() -> None:
    require_match(eagle3(), target())
    assert eagle_mismatches(eagle3(), target()) == []


def test_all_mismatches_with_the_target_are_told_at_once() -> None:
    other = target(12, hidden_size=64, vocab_size=97)
    with pytest.raises(ConfigError) as caught:
        require_match(eagle3(**{IDS: [1, 5, 12]}), other)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "vocab_size must be the target's 97, got 96; pass --speculative-draft" in lines[0]
    assert "target hidden size must be the target's 64, got 48" in lines[1]
    assert "must be layers 0 to 11 of the target, got [1, 5, 12]" in lines[2]


@pytest.mark.parametrize("layers", [1, 3, 4, 6])
def test_default_taps_of_a_shallow_target_are_refused(layers: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"deep enough.*got L = {layers} layers; name the layers in the head's"
    ):
        tap_names(eagle3(), target(layers))


def test_the_last_layer_may_be_tapped() -> None:
    assert tap_names(replace(eagle3(), tap_layers=(0, 1, 5)), target(6))[-1] == "layer.5"


def test_the_shipped_head_fits_its_target_and_is_no_target() -> None:
    assert "eagle3-llama-3.1-8b" not in shape_names()
    raw = locate("eagle3-llama-3.1-8b").config
    config, model = parse_eagle_config(raw, "EAGLE3"), parse_config(locate("llama-3.1-8b").config)
    assert eagle_mismatches(config, model) == []
    assert tap_names(config, model) == ("layer.1", "layer.15", "layer.28")
    with pytest.raises(ModelError, match=r"pass a draft head with --speculative-draft-model-path"):
        parse_config(raw)
