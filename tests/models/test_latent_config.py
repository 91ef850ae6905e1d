"""config.json files of models with latent attention: what is read, what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from paceline.core.errors import ModelError
from paceline.core.model.config import ExpertChoice, Heads, LatentConfig
from paceline.kernels.moe_choose import moe_choose
from paceline.models.checkpoint_names import of_the_model
from paceline.models.config import parse_config
from paceline.models.locate import locate
from paceline.models.registry import ARCHITECTURES

V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
}
LATENT = LatentConfig(rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536, pairs=True)
V3 = V2 | {"model_type": "deepseek_v3", "n_group": 3, "topk_group": 2}


def test_deepseek_v2_lite_has_one_row_of_576_and_one_dense_layer() -> None:
    config = parse_config(locate("deepseek-v2-lite").config)
    assert config.latent == replace(LATENT, q_rank=None)
    assert config.heads == (Heads(16, 1, 576, 512, v_in_k=True),)
    assert config.max_position == 163_840
    assert config.moe is not None
    assert config.moe.choice is None
    assert (config.moe.layers[0], all(config.moe.layers[1:])) == (False, True)
    assert (config.moe.shared_size, config.moe.shared_gate) == (2 * 1408, False)


def test_the_scale_is_that_of_expanded_heads_times_mscale_twice() -> None:
    """As of transformers: 192 ** -0.5, and 0.1 * 0.707 * ln 40 + 1 squared."""
    config = parse_config(locate("deepseek-v2-lite").config)
    theirs = transformers.DeepseekV2Config(**locate("deepseek-v2-lite").config)
    with torch.device("meta"):
        layer = transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention(theirs, 0)
    assert config.layers[0].scale == pytest.approx(layer.scaling)
    assert config.layers[0].scale != pytest.approx(192**-0.5)


@pytest.mark.parametrize("file", [V2, V3], ids=["v2", "v3"])
def test_class_defaults_stand_behind_a_short_file(file: dict[str, Any]) -> None:
    config = parse_config(file)
    assert config.latent == LATENT


def test_a_null_query_rank_is_none() -> None:
    config = parse_config(V2 | {"q_lora_rank": None})
    assert config.latent is not None
    assert config.latent.q_rank is None


def test_glm_says_which_layers_have_experts() -> None:
    glm = V2 | {"model_type": "glm4_moe_lite"}
    moe = parse_config(glm).moe
    assert moe is not None
    assert moe.layers == (False, True, True)
    moe = parse_config(glm | {"mlp_layer_types": ["sparse", "dense", "sparse"]}).moe
    assert moe is not None
    assert moe.layers == (True, False, True)


def test_layers_that_predict_a_token_further_are_left_out() -> None:
    stored = ["model.norm.weight", "model.layers.2.mlp.gate.weight", "model.layers.3.enorm.weight"]
    names = dict(zip(stored, stored, strict=True))
    assert list(of_the_model(names, ARCHITECTURES["deepseek_v3"], 3)) == stored[:2]
    assert list(of_the_model(names, ARCHITECTURES["deepseek_v2"], 3)) == stored
    apart = {"mtp.fc.weight": "", "model.layers.3.mlp.gate.weight": ""}
    assert [*of_the_model(apart, ARCHITECTURES["qwen3_next"], 3)] == [*apart][1:]


def test_layers_may_all_be_dense() -> None:
    assert parse_config(V3 | {"first_k_dense_replace": 3}).moe is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (V2 | {"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads 4"),
    "groups": (V3 | {"n_group": 4}, "n_group must be a divisor of n_routed_experts 6, got 4"),
    "chosen groups": (V3 | {"topk_group": 4}, "topk_group must be at most n_group 3, got 4"),
    "experts of groups": (
        V3 | {"topk_group": 1, "num_experts_per_tok": 3},
        "num_experts_per_tok must be at most the 2 of its groups, got 3",
    ),
    "experts": (
        V2 | {"num_experts_per_tok": 7},
        "num_experts_per_tok must be at most n_routed_experts 6, got 7",
    ),
    "weights": (V2 | {"norm_topk_prob": True}, "norm_topk_prob must be false: weights of DeepSeek"),
    "method": (
        V2 | {"topk_method": "noaux_tc"},
        "topk_method must be one of greedy, group",
    ),
    "scores": (V3 | {"scoring_func": "softmax"}, "scoring_func must be one of sigmoid"),
    "dense layers": (
        V2 | {"first_k_dense_replace": -1},
        "first_k_dense_replace must be a number of layers, got -1",
    ),
    "frequency": (V2 | {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
    "layer kinds": (
        V2 | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]},
        "mlp_layer_types must be a list of 3 of dense, sparse, got ['dense']",
    ),
    "rank": (V2 | {"kv_lora_rank": "512"}, "kv_lora_rank must be an integer of at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    file, text = REFUSED[name]
    with pytest.raises(ModelError, match=re.escape(text)):
        parse_config(file)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Expert 3 has the largest score; a bias brings 0 and 1, whose group then is the best."""
    logits = torch.tensor([[0.5, 0.1, 0.2, 2.0, -1.0, -2.0]])
    bias = torch.tensor([3.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    choice = ExpertChoice(
        num_groups=3, groups_per_token=1, best_of_group=2, sigmoid=True, biased=True, scale=2.0
    )
    routing = moe_choose(logits, bias, 2, choice, renormalize=True)
    assert routing.expert_ids.tolist() == [[0, 1]]
    scores = logits.sigmoid()[0, :2]
    torch.testing.assert_close(routing.weights[0], 2.0 * scores / scores.sum())
    plain = moe_choose(logits, None, 2, choice, renormalize=False)
    assert plain.expert_ids.tolist() == [[3, 2]]
