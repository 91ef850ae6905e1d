"""Cache groups: which layers share one, what they are called, what their KV depends on."""

from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError
from paceline.core.model.cache_groups import cache_group_specs, draft_group_specs
from paceline.core.model.config import (
    NO_HEADS,
    CacheKind,
    Heads,
    LayerSpec,
    ModelConfig,
    RowPart,
)


def config(*windows: int | None) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        max_position=64,
        rms_norm_eps=1e-6,
        layers=tuple(
            LayerSpec(heads=Heads(4, 2, 4, 4), scale=0.5, window=window) for window in windows
        ),
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


def test_layers_with_states_form_groups_behind_the_others_found_at_whole_pages() -> None:
    sums = LayerSpec(mixer="sum", state=(RowPart("sum", (3,)),))
    wide = replace(sums, state=(RowPart("sum", (5,)),))
    attends = config(None, 8).layers
    groups = cache_group_specs(replace(config(), layers=(sums, *attends, wide, sums)), 96)
    assert [(g.name, g.layer_ids, g.kind, g.mixer, g.state_every) for g in groups] == [
        ("full", (1,), CacheKind.TOKENS, "softmax", None),
        ("window-8", (2,), CacheKind.TOKENS, "softmax", None),
        ("sum-0", (0, 4), CacheKind.STATE, "sum", 576),
        ("sum-3", (3,), CacheKind.STATE, "sum", 576),
    ]
    assert groups[2].parts == sums.state


def test_layers_that_read_an_encoder_form_a_group_behind_all_others() -> None:
    plain, sums = config(None, None), LayerSpec(mixer="sum", state=(RowPart("sum", (3,)),))
    cross = replace(plain.layers[0], reads_encoder=True)
    layers = (cross, sums, *plain.layers, cross)
    groups = cache_group_specs(replace(plain, layers=layers, max_encoder_len=30), 8)
    assert [(g.name, g.layer_ids, g.kind, g.encoder_len) for g in groups] == [
        ("full", (2, 3), CacheKind.TOKENS, None),
        ("sum", (1,), CacheKind.STATE, None),
        ("encoder", (0, 4), CacheKind.ENCODER, 30),
    ]
    assert groups[2].parts == plain.layers[0].rows


def test_a_group_of_an_encoders_rows_says_how_many_there_may_be() -> None:
    plain = config(None)
    cross = replace(plain, layers=(replace(plain.layers[0], reads_encoder=True),))
    with pytest.raises(
        ConfigError,
        match="encoder_len of cache group 'encoder' must be a positive number of rows in an "
        "ENCODER group, and None in others, got 0; say in max_encoder_len",
    ):
        cache_group_specs(cross, 4)
    with pytest.raises(ConfigError, match=r"window of .* must be None: .* got 8"):
        cache_group_specs(
            replace(cross, layers=(replace(cross.layers[0], window=8),), max_encoder_len=3), 4
        )
    (full,) = cache_group_specs(plain, 4)
    with pytest.raises(ConfigError, match=r"encoder_len of .* 'full' must be .* got 30"):
        replace(full, encoder_len=30)


def test_layers_that_cache_other_rows_share_no_group() -> None:
    same = config(None, 8, None, None, 8)
    wide, latent = Heads(4, 4, 8, 8), Heads(4, 1, 12, 8, v_in_k=True)
    more_queries = Heads(8, 2, 4, 4)  # caches what four do
    heads = (same.layers[0].heads, wide, latent, more_queries, wide)
    layers = tuple(replace(x, heads=y) for x, y in zip(same.layers, heads, strict=True))
    groups = cache_group_specs(replace(same, layers=layers), 4)
    assert [(group.name, group.layer_ids) for group in groups] == [
        ("full-0", (0, 3)),
        ("full-2", (2,)),
        ("window-8", (1, 4)),
    ]
    assert [group.parts for group in groups] == [layers[index].rows for index in (0, 2, 1)]
    assert [group.page_bytes(2) for group in groups] == [
        2 * 4 * 2 * (2 * 4 + 2 * 4),
        1 * 4 * 2 * 12,
        2 * 4 * 2 * (4 * 8 + 4 * 8),
    ]


def test_a_layer_that_caches_nothing_is_in_no_group() -> None:
    plain = config(None, None)
    layers = (plain.layers[0], replace(plain.layers[1], heads=NO_HEADS))
    (full,) = cache_group_specs(replace(plain, layers=layers), 4)
    assert (full.name, full.layer_ids) == ("full", (0,))


def test_heads_are_told_as_people_call_them() -> None:
    assert str(Heads(32, 8, 128, 128)) == "32/8 heads of 128"
    assert str(Heads(4, 4, 24, 16)) == "4/4 heads of 24, V of 16"
    assert str(Heads(16, 1, 576, 512, v_in_k=True)) == "16 heads over latents of 512 + 64"


def test_the_heads_of_a_model_are_those_of_most_layers_first() -> None:
    same, wide = config(None, None, None), Heads(4, 4, 8, 8)
    layers = (replace(same.layers[0], heads=wide), *same.layers[1:])
    shift = LayerSpec(mixer="shift")  # has none
    heads = replace(same, layers=(*layers, shift, shift, shift)).heads
    assert heads == (same.layers[1].heads, wide)
