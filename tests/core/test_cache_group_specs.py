"""Cache groups of a drafter: what they are called, and what their KV depends on."""

import pytest

from paceline.core.model_config import (
    ModelConfig,
    RopeConfig,
    cache_group_specs,
    draft_group_specs,
)


def config(*windows: int | None) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=len(windows),
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        v_head_dim=4,
        rotary_dim=4,
        max_position=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        layer_windows=windows,
        attention_scale=0.5,
        hidden_act="silu",
        tie_word_embeddings=False,
        eos_token_ids=(2,),
        dtype="float32",
    )


@pytest.mark.parametrize("next_token", [True, False])
def test_a_drafters_groups_are_those_of_its_model_by_another_name(next_token: bool) -> None:
    full, windowed = draft_group_specs(config(None, 8, None), 4, next_token=next_token)
    assert (full.name, full.layer_ids, full.window) == ("draft-full", (0, 2), None)
    assert (windowed.name, windowed.layer_ids, windowed.window) == ("draft-window-8", (1,), 8)
    assert full.draft
    assert windowed.draft
    assert full.next_token is windowed.next_token is next_token


def test_a_targets_groups_are_no_drafters() -> None:
    (full,) = cache_group_specs(config(None), 4)
    assert not full.draft
    assert not full.next_token
