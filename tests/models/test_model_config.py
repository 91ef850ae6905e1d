"""config.json in every spelling gives one ModelConfig; what we cannot do is refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.core.errors import ModelError
from paceline.core.model.config import Heads, ModelConfig, NormKind, QKNorm, QueryGrowth
from paceline.core.model.lookback import Chunk
from paceline.core.model.rope import RopeKind
from paceline.layers.rope import rope_frequencies
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.models.registry import ARCHITECTURES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
QWEN = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
MISTRAL = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
LLAMA4 = {"model_type": "llama4_text", "num_hidden_layers": 4}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 32}
PHI = LLAMA | {
    "model_type": "phi3",
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}


@pytest.mark.parametrize("name", shape_names())
def test_old_and_new_spelling_of_released_models_agree(name: str, tmp_path: Path) -> None:
    """transformers reads the released file and writes it in its own new spelling."""
    classic = locate(name).config
    settings = {key: value for key, value in classic.items() if key != "model_type"}
    transformers.AutoConfig.for_model(classic["model_type"], **settings).save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in rewritten
    old, new = parse_config(classic), parse_config(rewritten)
    assert replace(new, eos_token_ids=old.eos_token_ids) == old


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.window for layer in config.layers)


def test_llama_4_has_rope_and_chunks_in_three_layers_of_four() -> None:
    config = parse_config(LLAMA4 | {"attn_temperature_tuning": 4, "moe_layers": [1, 3]})
    assert [layer.window for layer in config.layers] == [Chunk(8192)] * 3 + [None]
    assert [layer.rope is None for layer in config.layers] == [False] * 3 + [True]
    assert config.query_growth == QueryGrowth(every=8192, factor=0.1)
    assert config.moe is not None
    assert config.moe.layers == (False, True, False, True)
    assert (config.intermediate_size, config.moe.intermediate_size) == (16384, 8192)
    plain = {"attn_temperature_tuning": False, "use_qk_norm": False, "moe_layers": []}
    changed = parse_config(LLAMA4 | plain | {"attention_chunk_size": 131072})
    assert {layer.window for layer in changed.layers} == {None}
    assert (changed.query_growth, changed.qk_norm, changed.moe) == (None, QKNorm.NONE, None)


def test_llama_31_has_its_published_numbers() -> None:
    config = parse_config(locate("llama-3.1-8b").config)
    assert config.heads == (Heads(32, 8, 128, 128),)
    assert config.max_position == 131072
    assert config.ropes[0][0].kind is RopeKind.LLAMA3
    assert config.ropes[0][0].original_max_position == 8192
    assert config.layers[0].scale == pytest.approx(128**-0.5)
    assert config.dtype == "bfloat16"


def test_gemma_windows_all_layers_but_each_sixth() -> None:
    config = parse_config(GEMMA)
    assert windows(config) == (32, 32, 32, 32, 32, None, 32)
    thetas = [layer.rope.theta for layer in config.layers if layer.rope is not None]
    assert thetas == [*[10_000] * 5, 1_000_000, 10_000]


def test_a_sparse_multimodal_gemma_is_read_with_the_defaults_of_transformers() -> None:
    """As released for 4B: text_config leaves out what equals the class defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"model_type": "gemma3", "text_config": text | {"eos_token_id": 5}}
    outer |= {"eos_token_id": [1, 106]}
    config = parse_config(outer | {"torch_dtype": "bfloat16"})
    theirs = transformers.Gemma3TextConfig(**text)
    assert config.model_type == "gemma3_text"
    assert config.vocab_size == theirs.vocab_size
    assert config.heads == (
        Heads(
            theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim, theirs.head_dim
        ),
    )
    assert config.max_position == theirs.max_position_embeddings
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106)
    (local, _), (full, _) = config.ropes
    assert (local.kind, full.factor) == (RopeKind.DEFAULT, 8.0)
    sliding = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [window == 1024 for window in windows(config)] == sliding


def test_qwen_windows_only_upper_layers_and_only_when_switched_on() -> None:
    window = {"sliding_window": 16, "max_window_layers": 1}
    assert windows(parse_config(QWEN | window)) == (None, None, None)
    switched = QWEN | window | {"use_sliding_window": True}
    assert windows(parse_config(switched)) == (None, 16, 16)
    none_below = switched | {"max_window_layers": 0}
    assert windows(parse_config(none_below)) == (16, 16, 16)
    explicit = switched | {"layer_types": ["sliding_attention", *["full_attention"] * 2]}
    assert windows(parse_config(explicit)) == (16, None, None)


def test_mistral_windows_every_layer_unless_null_switches_it_off() -> None:
    assert windows(parse_config(MISTRAL | {"sliding_window": 64})) == (64, 64, 64)
    assert windows(parse_config(MISTRAL | {"sliding_window": None})) == (None,) * 3
    long = MISTRAL | {"max_position_embeddings": 8192}
    assert windows(parse_config(long)) == (4096,) * 3
    assert transformers.MistralConfig().sliding_window == 4096


def test_a_window_as_long_as_the_context_is_none() -> None:
    for window, expected in ((255, 255), (256, None), (300, None)):
        config = parse_config(PHI | {"sliding_window": window, "rope_scaling": LONGROPE})
        assert windows(config) == (expected,) * 3


def test_gelu_of_the_first_gemma_is_the_approximation_it_was_trained_with() -> None:
    first = LLAMA | {"model_type": "gemma", "num_key_value_heads": 1}
    for named in ({"hidden_act": "gelu"}, {}):
        assert parse_config(first | named).hidden_act == "gelu_pytorch_tanh"
    assert parse_config(LLAMA | {"hidden_act": "gelu"}).hidden_act == "gelu"


def test_gemma2_is_read_with_the_defaults_of_transformers() -> None:
    config, theirs = parse_config({"model_type": "gemma2"}), transformers.Gemma2Config()
    assert config.layers[0].soft_cap == theirs.attn_logit_softcapping
    assert config.logit_soft_cap == theirs.final_logit_softcapping
    assert config.max_position == theirs.max_position_embeddings
    assert config.vocab_size == theirs.vocab_size
    assert config.layers[0].scale == theirs.query_pre_attn_scalar**-0.5
    expected = [4096 if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert windows(config) == tuple(expected)
    no_caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = parse_config({"model_type": "gemma2"} | no_caps)
    assert (config.layers[0].soft_cap, config.logit_soft_cap) == (None, None)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_has_three_names_for_longrope(name: str) -> None:
    config = parse_config(PHI | {"rope_scaling": LONGROPE | {"type": name}})
    assert config.ropes[0][0].kind is RopeKind.LONGROPE
    assert config.short_context == 32
    assert config.ropes[0][0].factor == 8.0
    assert config.ropes[0][1] == 12
    assert config.max_position == 256


def test_the_trained_context_beside_rope_parameters_comes_first() -> None:
    inner = LONGROPE | {"original_max_position_embeddings": 64}
    assert parse_config(PHI | {"rope_scaling": inner}).short_context == 32
    theirs = transformers.Phi3Config(
        **{k: v for k, v in PHI.items() if k != "model_type"}, rope_scaling=inner
    )
    assert theirs.rope_parameters["original_max_position_embeddings"] == 32


def test_biases_follow_the_architecture() -> None:
    def biases(config: dict[str, Any]) -> tuple[bool, bool, bool]:
        parsed = parse_config(config)
        return parsed.attention_bias, parsed.attention_out_bias, parsed.mlp_bias

    assert biases(LLAMA) == (False, False, False)
    assert biases(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases(QWEN) == (True, False, False)
    assert biases(QWEN | {"model_type": "qwen3"}) == (False, False, False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt-oss-20b", NormKind.WIDE),
        ("llama-3.1-8b", NormKind.ROUNDED),
        ("gemma-2-9b", NormKind.UNIT_OFFSET),
    ],
)
def test_norms_round_where_the_architecture_does(name: str, kind: NormKind) -> None:
    assert parse_config(locate(name).config).norm is kind


def test_end_tokens_of_both_files_count_once() -> None:
    config = parse_config(LLAMA | {"eos_token_id": 7}, {"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (7, 9)
    assert parse_config(LLAMA).eos_token_ids == ()


def test_yarn_extends_the_context_of_an_unchanged_config() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse_config(QWEN | {"rope_scaling": yarn}).max_position == 1024


def test_dynamic_rope_is_plain_within_the_context_that_is_served() -> None:
    dynamic = parse_config(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert dynamic == parse_config(LLAMA)


def test_factors_of_yarn_that_change_nothing_are_read() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    extra = {"attn_factor": 1.0, "extrapolation_factor": 1.0, "finetuned": True}
    assert parse_config(LLAMA | {"rope_scaling": yarn | extra}) == parse_config(
        LLAMA | {"rope_scaling": yarn}
    )


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_may_be_spelled_as_torch_prints_it(name: str) -> None:
    assert parse_config(LLAMA | {name: "torch.bfloat16"}).dtype == "bfloat16"


def test_the_language_part_of_a_mistral_3_is_read() -> None:
    text = {key: value for key, value in MISTRAL.items() if key != "model_type"}
    outer = {"model_type": "mistral3", "text_config": text, "torch_dtype": "bfloat16"}
    expected = parse_config(MISTRAL | {"torch_dtype": "bfloat16"})
    assert parse_config(outer) == expected
    named = outer | {"text_config": text | {"model_type": "mistral"}}
    assert parse_config(named) == expected


def test_unused_fields_of_a_config_are_harmless() -> None:
    extra = {"transformers_version": "4.40.0", "attention_dropout": 0.0, "pretraining_tp": 1}
    assert parse_config(LLAMA | extra) == parse_config(LLAMA)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_what_a_file_leaves_out_is_what_its_class_takes(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type)
    ropes = getattr(theirs, "rope_parameters", None)  # None: nothing turns
    if model_type in ("falcon_h1", "granitemoehybrid"):  # its class divides what is left to it
        theirs.mamba_d_head = "auto"
    taken = {
        name: ropes[name] if name == "rope_theta" else getattr(theirs, name)
        for name in ARCHITECTURES[model_type].defaults
    }
    if "sliding_window" in taken and model_type.startswith("qwen"):
        taken["sliding_window"] = 4096  # the class sets it to None unless it is switched on
        switched = transformers.AutoConfig.for_model(model_type, use_sliding_window=True)
        assert switched.sliding_window == 4096
    assert taken == dict(ARCHITECTURES[model_type].defaults)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_what_its_class_saves_is_read(model_type: str, tmp_path: Path) -> None:
    """A class writes more than a released file has: Qwen2MoeConfig a window of 0, switched off.
    DeepseekV2Config alone leaves out what no model of it can do without."""
    needed = {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}
    theirs = transformers.AutoConfig.for_model(model_type, **needed)
    theirs.save_pretrained(tmp_path)
    config = parse_config(json.loads((tmp_path / "config.json").read_text()))
    context = getattr(theirs, "max_position_embeddings", config.max_position)  # mamba2 has none
    first = 0 if config.encoder is None else config.encoder.first_position
    blocks = config.num_layers // 2 if model_type == "whisper" else config.num_layers
    assert (blocks, config.max_position + first) == (theirs.num_hidden_layers, context)
    kv_heads = {
        each.num_kv_heads for each in (layer.heads for layer in config.layers) if each.num_heads
    }
    if config.encoder is not None:
        assert kv_heads == {theirs.num_attention_heads}
    elif kv_heads:
        assert config.heads[0].num_kv_heads == (
            theirs.num_key_value_heads if config.latent is None else 1
        )


def test_absent_kv_heads_mean_those_of_the_class_and_null_one_per_head() -> None:
    assert parse_config(LLAMA).heads[0].num_kv_heads == 4
    eight = LLAMA | {"model_type": "mistral", "num_attention_heads": 16}
    assert parse_config(eight).heads[0].num_kv_heads == 8
    assert parse_config(eight | {"model_type": "qwen3_moe"}).heads[0].num_kv_heads == 4
    assert parse_config(eight | {"num_key_value_heads": None}).heads[0].num_kv_heads == 16


def test_an_absent_context_is_that_of_the_class() -> None:
    silent = {key: value for key, value in QWEN.items() if key != "max_position_embeddings"}
    for model_type, context in (("llama", 2048), ("mistral", 131_072), ("qwen2", 32_768)):
        assert parse_config(silent | {"model_type": model_type}).max_position == context


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_window_switched_on_and_null_is_none(model_type: str) -> None:
    settings = {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}
    sizes = {key: value for key, value in QWEN.items() if key != "model_type"}
    theirs = transformers.AutoConfig.for_model(model_type, **sizes, **settings)
    assert theirs.sliding_window is None
    config = parse_config(QWEN | settings | {"model_type": model_type})
    assert windows(config) == (None,) * 3


def test_layer_types_of_a_mistral_name_its_windowed_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    named = MISTRAL | {"layer_types": kinds}
    assert windows(parse_config(named | {"sliding_window": 64})) == (64, None, 64)
    assert windows(parse_config(named | {"sliding_window": 256})) == (None,) * 3


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_the_trained_context_beside_the_rope_comes_first(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 128}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings = {"rope_scaling": rope, "original_max_position_embeddings": 32}
    sizes = {key: value for key, value in LLAMA.items() if key != "model_type"}
    theirs = transformers.LlamaConfig(**sizes, **json.loads(json.dumps(settings)))
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    config = parse_config(LLAMA | settings)
    assert config.ropes[0][0].original_max_position == 32
    ours = rope_frequencies(*config.ropes[0], context_len=config.max_position)
    assert torch.allclose(ours, module.inv_freq, rtol=1e-6)


def test_the_trained_context_beside_a_rope_per_attention_type_does_not_count() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    settings = {"rope_scaling": yarn, "original_max_position_embeddings": 32}
    theirs = transformers.Gemma3TextConfig(**json.loads(json.dumps(settings)))
    context = theirs.rope_parameters["full_attention"]["original_max_position_embeddings"]
    assert parse_config(GEMMA | settings).ropes[1][0].original_max_position == context


def test_phi3_has_the_trained_context_of_its_class() -> None:
    """transformers takes it even where the rope object names another."""
    silent = {k: v for k, v in PHI.items() if k != "original_max_position_embeddings"}
    rope = LONGROPE | {"original_max_position_embeddings": 64}
    sizes = {key: value for key, value in silent.items() if key != "model_type"}
    theirs = transformers.Phi3Config(**sizes, rope_scaling=dict(rope))
    context = theirs.rope_parameters["original_max_position_embeddings"]
    assert parse_config(silent | {"rope_scaling": rope}).short_context == context == 4096


LINEAR = {"rope_type": "linear"}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": (
        {"model_type": "mamba"},
        "model_type must be one of .*gemma, gemma2, gemma3, .*llama, .*mixtral, .*, got 'mamba'",
    ),
    "architecture in a list": (
        LLAMA | {"model_type": ["llama"]},
        r"model_type must be one of bert, deepseek_v2, .*, got \['llama'\]",
    ),
    "architecture in an object": (
        LLAMA | {"model_type": {"llama": 1}},
        "model_type must be one of bert, deepseek_v2, .*, got {'llama': 1}",
    ),
    "no architecture": ({"vocab_size": 3}, "model_type must be one of .* got None"),
    "absurd layers": (
        LLAMA | {"num_hidden_layers": 10**30},
        "num_hidden_layers must be at most 10000, got 10*",
    ),
    "quantised": (
        LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}},
        "quantization_config.quant_method must be one of fp8, .*got 'bitsandbytes'",
    ),
    "activation": (
        LLAMA | {"hidden_act": "quick_gelu"},
        "hidden_act must be one of silu, swish, gelu, .*relu, got 'quick_gelu'",
    ),
    "heads of nothing": (
        LLAMA | {"num_attention_heads": 65},
        "num_attention_heads must be at most hidden_size 64, got 65",
    ),
    "missing size": (
        {key: value for key, value in LLAMA.items() if key != "hidden_size"},
        "hidden_size must be an integer of at least 1, got nothing; check the model's config.json",
    ),
    "wrong type": (
        LLAMA | {"num_hidden_layers": "3"},
        "num_hidden_layers must be an integer of at least 1, got '3'",
    ),
    "flag as a word": (
        LLAMA | {"tie_word_embeddings": "yes"},
        "tie_word_embeddings must be true or false, got 'yes'",
    ),
    "not finite": (
        LLAMA | {"rms_norm_eps": float("nan")},
        "rms_norm_eps must be a positive number, got nan",
    ),
    "heads": (
        LLAMA | {"num_key_value_heads": 3},
        "num_key_value_heads must be a divisor of num_attention_heads 4, got 3",
    ),
    "odd head": (LLAMA | {"head_dim": 15}, "head_dim must be even, got 15"),
    "dtype": (LLAMA | {"torch_dtype": "int8"}, "torch_dtype must be one of bfloat16, .*'int8'"),
    "rope kind": (
        LLAMA | {"rope_scaling": {"rope_type": "proportional", "factor": 4}},
        "rope_type must be one of default, linear, llama3, yarn, longrope, dynamic, got 'propo",
    ),
    "longrope without its trained context": (
        LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "original_max_position_embeddings must be an integer of at least 2, got nothing",
    ),
    "longrope without factors": (
        PHI | {"rope_scaling": {"type": "longrope"}},
        "short_factor must be a list of positive numbers, got nothing",
    ),
    "longrope factors": (
        PHI | {"rope_scaling": LONGROPE | {"long_factor": [1, 2, 0]}},
        r"long_factor must be a list of positive numbers, got \[1, 2, 0\]",
    ),
    "longrope factors of another size": (
        PHI | {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 8}},
        "long_factor must be a list of 6, one for each pair that rope turns, got '8 numbers'",
    ),
    "longrope of another model": (
        PHI | {"rope_scaling": LONGROPE | {"short_mscale": 1.1}},
        "short_mscale must be absent, got 1.1; this rope is not supported",
    ),
    "odd partial rope": (
        PHI | {"partial_rotary_factor": 0.7},
        "partial_rotary_factor must be an even number of the 16 dimensions of a head, got 0.7",
    ),
    "su of another model": (
        LLAMA | {"rope_scaling": {"type": "su"}},
        "rope_parameters: type must be one of .*, got 'su'",
    ),
    "layer kinds of qwen3_moe": (
        QWEN | {"model_type": "qwen3_moe", "layer_types": ["full_attention"] * 3},
        "layer_types must be absent, got .*; qwen3_moe has one kind of layer",
    ),
    "sliding layers of a mistral without a window": (
        MISTRAL | {"layer_types": ["sliding_attention"] * 3, "sliding_window": None},
        "sliding_window must be set for sliding_attention layers, got nothing",
    ),
    "gpt-oss windows switched off by null": (
        MISTRAL | {"model_type": "gpt_oss", "sliding_window": None},
        "sliding_window must be set for sliding_attention layers, got nothing",
    ),
    "gemma3 windows switched off by null": (
        GEMMA | {"sliding_window": None},
        "sliding_window must be set for sliding_attention layers, got nothing",
    ),
    "heads of the class": (
        {**LLAMA, "model_type": "mistral"},
        "num_key_value_heads must be a divisor of num_attention_heads 4, got 8, which this "
        "model_type takes where the file is silent; check",
    ),
    "layer kinds of phi3": (
        PHI | {"layer_types": ["full_attention"] * 3},
        "layer_types must be absent, got .*; phi3 has one kind of layer",
    ),
    "gemma2 windows switched off by null": (
        {"model_type": "gemma2", "sliding_window": None},
        "sliding_window must be set for sliding_attention layers, got nothing",
    ),
    "dynamic rope without factor": (
        LLAMA | {"rope_scaling": {"type": "dynamic"}},
        "rope_parameters: factor must be a positive number, got nothing",
    ),
    "yarn of another engine": (
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4, "attn_factor": 1.5}},
        "attn_factor must be absent, got 1.5; this rope is not supported",
    ),
    "a cap that Gemma 3 has not": (
        GEMMA | {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping must be absent, got 50.0; Gemma 3 was trained without a cap on "
        "scores, and transformers applies none: remove it",
    ),
    "two activations of gemma": (
        LLAMA
        | {"model_type": "gemma", "num_key_value_heads": 1, "hidden_act": "gelu"}
        | {"hidden_activation": "relu"},
        "hidden_activation must be hidden_act, gelu_pytorch_tanh, got 'relu'",
    ),
    "rope switches of smollm3": (
        QWEN | {"model_type": "smollm3", "no_rope_layers": [1, 2, 1]},
        r"no_rope_layers must be a list of 3 times 0 or 1, got \[1, 2, 1\]",
    ),
    "rope switches of llama4": (
        LLAMA4 | {"no_rope_layers": [1, 0]},
        r"no_rope_layers must be a list of 4 times 0 or 1, got \[1, 0\]",
    ),
    "layer kinds of llama4": (
        LLAMA4 | {"layer_types": ["sliding_attention"] * 4},
        "layer_types must be a list of 4 times full_attention or chunked_attention, got",
    ),
    "chunks of llama4 switched off by null": (
        LLAMA4 | {"attention_chunk_size": None},
        "attention_chunk_size must be set for chunked_attention layers, got nothing",
    ),
    "several experts of llama4": (
        LLAMA4 | {"num_experts_per_tok": 2},
        "num_experts_per_tok must be 1, got 2; an input is scaled for one expert",
    ),
    "layers with experts of llama4": (
        LLAMA4 | {"moe_layers": [4]},
        r"moe_layers must be a list of layers from 0 to 3, got \[4\]",
    ),
    "queries of llama4": (
        LLAMA4 | {"attn_temperature_tuning": "yes"},
        "attn_temperature_tuning must be true or false, got 'yes'",
    ),
    "clipped olmo2": (
        LLAMA | {"model_type": "olmo2", "clip_qkv": 8.0},
        "clip_qkv must be absent, got 8.0; OLMo 2 has norms of Q and K in its place",
    ),
    "layer kinds of mixtral": (
        MISTRAL | {"model_type": "mixtral", "layer_types": ["full_attention"] * 3},
        "layer_types must be absent, got .*; mixtral has one kind of layer",
    ),
    "language part of another model": (
        {"model_type": "mistral3", "text_config": {"model_type": "llama"}},
        "text_config.model_type must be mistral, in a file of mistral3, got 'llama'",
    ),
    "rope without factor": (
        LLAMA | {"rope_scaling": LINEAR},
        "rope_parameters: factor must be a positive number, got nothing",
    ),
    "rope factors": (
        LLAMA | {"rope_scaling": LLAMA3},
        "high_freq_factor must be at least low_freq_factor 4.0, got 3.0",
    ),
    "partial rope": (
        LLAMA | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor must be 1.0, got 0.5; only rope over the whole head",
    ),
    "rope sections": (
        LLAMA | {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}},
        "mrope_section must be absent, got .*; this rope is not supported",
    ),
    "rope per type": (
        LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters must be one set for all layers",
    ),
    "flat gemma rope": (
        GEMMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "rope_parameters must be one object for each of full_attention, sliding_attention",
    ),
    "attention kind": (
        LLAMA | {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        "layer_types must be made of full_attention, sliding_attention, got 'chunked_attention'",
    ),
    "too few kinds": (
        LLAMA | {"layer_types": ["full_attention"]},
        "layer_types must be a list of 3 names",
    ),
    "window without a size": (
        LLAMA | {"layer_types": ["sliding_attention"] * 3},
        "sliding_window must be set for sliding_attention layers, got nothing",
    ),
    "bidirectional": (
        LLAMA | {"use_bidirectional_attention": True},
        "use_bidirectional_attention must be absent, got True; this model_type",
    ),
    "bidirectional in transformers' own word": (
        LLAMA | {"is_causal": False},
        "is_causal must be true, or absent, got False; this model_type is served as a causal model",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_we_cannot_do_is_refused_by_name(case: str) -> None:
    config, text = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        parse_config(config)
    assert re.search(text, str(caught.value)), str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("given", [{"model_type": "bert"}, GEMMA])
def test_a_model_that_sees_ahead_may_say_so_in_both_words(given: dict[str, Any]) -> None:
    said = {"use_bidirectional_attention": True, "is_causal": False}
    assert parse_config(given | said).looks_ahead
