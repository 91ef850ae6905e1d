"""EngineOptions: one source of names, strictly checked."""

from dataclasses import fields

import pytest

from paceline.core.errors import ConfigError
from paceline.core.gpus import GPUS, gpu_by_name
from paceline.core.options.asked import engine_options
from paceline.core.options.engine_options import EngineOptions
from paceline.core.options.spec import spec_of
from paceline.core.request.sampling_params import SamplingParams


def test_every_field_is_an_option_with_help_and_unique_flags():
    flags = []
    for option in fields(EngineOptions):
        spec = spec_of(option)
        assert spec.help.endswith(".")
        flags += [*spec.flags, *spec.off_flags]
    assert len(flags) == len(set(flags))
    words = [flag for flag in flags if flag != "-tp"]  # as other engines spell it
    assert all(flag.startswith("--") and "_" not in flag for flag in words)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"page_size": 0}, "page_size must be at least 1 tokens, got 0; set --page-size"),
        ({"page_size": True}, "page_size must be int tokens, got True"),
        ({"page_size": "many"}, "page_size must be a number of tokens such as 4096 or 32k, got"),
        ({"chunked_prefill_size": -1}, "chunked_prefill_size must be at least 1 tokens, got -1"),
        ({"gpu_memory_utilization": 1.5}, "must be from 0.01 to 1, got 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "must be from 0.01 to 1, got nan"),
        ({"dtype": "int4"}, "dtype must be one of bfloat16, float16, float32, got 'int4'"),
        (
            {"kv_cache_dtype": "int8"},
            "kv_cache_dtype must be one of bfloat16, float16, float32, fp8_e4m3, got 'int8'",
        ),
        ({"load_format": "gguf"}, "load_format must be one of auto, dummy, got 'gguf'"),
        ({"enable_prefix_cache": 1}, "enable_prefix_cache must be bool, got 1"),
        ({"model": None}, "model must be str, got None"),
        (
            {"speculative_algorithm": "NEXTN"},
            "speculative_algorithm must be one of EAGLE, EAGLE3, MTP, NGRAM, STANDALONE, off, got "
            "'NEXTN'; set --speculative-algorithm accordingly or leave it out to let the engine",
        ),
        (
            {"speculative_eagle_topk": 0},
            "speculative_eagle_topk must be from 1 to 16, got 0; set --speculative-eagle-topk",
        ),
        ({"speculative_num_draft_tokens": 1}, "must be from 2 to 256 tokens, got 1"),
        ({"speculative_num_steps": 0}, "speculative_num_steps must be from 1 to 64 tokens, got 0"),
        ({"speculative_acceptance": "typical"}, "one of sample_and_match, rejection, got"),
        (
            {"force_accept_len": 0.9},
            "force_accept_len must be at least 1 tokens, got 0.9; set --force-accept-len "
            "accordingly or leave it out",
        ),
        ({"seed": -(2**63) - 1}, "seed must be from -9.22337e+18 to 9.22337e+18, got -92"),
        ({"seed": 2**63}, "seed must be from -9.22337e+18 to 9.22337e+18, got 92"),
    ],
)
def test_wrong_values_are_refused(asked, text):
    with pytest.raises(ConfigError) as caught:
        engine_options(asked)
    assert text in str(caught.value)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_seed_of_a_request_is_a_seed_of_the_engine(seed):
    assert engine_options({"seed": seed}).seed == SamplingParams(seed=seed).seed == seed


def test_another_word_for_a_choice_means_that_choice():
    assert engine_options({"kv_cache_dtype": "fp8"}).kv_cache_dtype == "fp8_e4m3"
    assert engine_options({"speculative_algorithm": "eagle3"}).speculative_algorithm == "EAGLE3"


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"got page_sise; did you mean page_size\?"):
        engine_options({"page_sise": 16})


def test_auto_leaves_an_open_field_open():
    options = engine_options({"dtype": "auto", "attention_backend": "auto", "load_format": "auto"})
    assert options.dtype is None
    assert options.attention_backend is None
    assert options.load_format == "auto"


def test_whole_numbers_are_accepted_where_fractions_are():
    assert engine_options({"gpu_memory_utilization": 1}).gpu_memory_utilization == 1


def test_gpu_names_are_forgiving_in_case_and_dashes():
    assert gpu_by_name("RTX_4090") is GPUS["rtx-4090"]
    assert gpu_by_name("H200").cuda_arch == (9, 0)


def test_an_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"gpu must be one of a100-40gb, .* got h9000"):
        gpu_by_name("h9000")


def test_every_gpu_has_a_source():
    assert all(facts.source and facts.total_bytes > 1 << 30 for facts in GPUS.values())
