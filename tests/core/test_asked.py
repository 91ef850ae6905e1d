"""What may be typed or passed for an option: names, words, sizes."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.options.asked import engine_options, named
from paceline.core.options.engine_options import EngineOptions
from paceline.core.options.spec import spec_of


def test_every_flag_is_a_name_in_python_too():
    for option in fields(EngineOptions):
        spec = spec_of(option)
        for flag in spec.flags:
            assert named({flag.lstrip("-").replace("-", "_"): None}) == {option.name: None}
        for flag in spec.off_flags:
            assert named({flag[2:].replace("-", "_"): True}) == {option.name: False}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"context_length": 64}, {"max_model_len": 64}),
        ({"mem_fraction_static": 0.5}, {"gpu_memory_utilization": 0.5}),
        ({"max_running_requests": 4}, {"max_num_seqs": 4}),
        ({"disable_radix_cache": True}, {"enable_prefix_cache": False}),
        ({"disable_radix_cache": False}, {"enable_prefix_cache": True}),
        ({"enable_prefix_caching": False}, {"enable_prefix_cache": False}),
        ({"disable_cuda_graph": True}, {"enforce_eager": True}),
        ({"disable_overlap_schedule": True}, {"overlap": False}),
        ({"model_path": "x"}, {"model": "x"}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"tp": 2}, {"tensor_parallel_size": 2}),
        ({"tp_size": 2}, {"tensor_parallel_size": 2}),
        ({"model": Path("a/b")}, {"model": "a/b"}),
        ({"device": "gpu"}, {"device": "cuda"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": torch.half}, {"dtype": "float16"}),
        ({"dtype": "BF16"}, {"dtype": "bfloat16"}),
        ({"dtype": "auto"}, {"dtype": "auto"}),
        ({"speculative_algorithm": "Eagle3"}, {"speculative_algorithm": "EAGLE3"}),
        ({"kv_cache_dtype": torch.float32}, {"kv_cache_dtype": "float32"}),
        (
            {"attention_backend": EngineOptions},
            {"attention_backend": "paceline.core.options.engine_options:EngineOptions"},
        ),
        ({"logits_processors": ["a:B"]}, {"logits_processors": ("a:B",)}),
        ({"max_model_len": "32k"}, {"max_model_len": 32768}),
        ({"max_model_len": "32K"}, {"max_model_len": 32768}),
        ({"max_model_len": "auto"}, {"max_model_len": "auto"}),
        ({"max_num_batched_tokens": "8192"}, {"max_num_batched_tokens": 8192}),
        ({"kv_cache_bytes": "4GiB"}, {"kv_cache_bytes": 4 << 30}),
        ({"kv_cache_bytes": "1.5g"}, {"kv_cache_bytes": 3 << 29}),
        ({"kv_cache_bytes": "4GB"}, {"kv_cache_bytes": 4_000_000_000}),
        ({"kv_cache_bytes": "9007199254740993"}, {"kv_cache_bytes": 9007199254740993}),
        ({"kv_cache_memory_bytes": "512 MiB"}, {"kv_cache_bytes": 512 << 20}),
    ],
)
def test_other_names_and_words_mean_the_engines_own(asked, meant):
    assert named(asked) == meant
    assert named(meant) == meant


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"max_num_sqs": 1}, "got max_num_sqs; did you mean max_num_seqs?"),
        ({"contextlength": 1}, "got contextlength; did you mean context_length?"),
        ({"trust_remote_code": True}, "got trust_remote_code; see paceline generate --help"),
        (
            {"max_model_len": 1, "context_length": 2},
            "max_model_len must be given once, got also as context_length; keep one of the two",
        ),
        (
            {"context_length": 2, "max_model_len": 1},
            "max_model_len must be given once, got also as context_length; keep one of the two",
        ),
        (
            {"tensor_parallel_size": 1, "tp": 1},
            "tensor_parallel_size must be given once, got also as tp; keep one of the two",
        ),
        ({"max_model_len": "4GiB"}, "max_model_len must be a number of tokens such as 4096 or 32k"),
        ({"max_model_len": "1.0001k"}, "must be a whole number of tokens, got '1.0001k'; round it"),
        ({"max_model_len": "-1"}, "must be a number of tokens such as 4096 or 32k, got '-1'"),
        ({"kv_cache_bytes": "4XB"}, "must be a number of bytes such as 500000000, 4GiB or 1.5g"),
        ({"kv_cache_bytes": "4iB"}, "must be a number of bytes such as 500000000, 4GiB or 1.5g"),
        ({"dtype": "bfloat"}, "got 'bfloat'; did you mean bfloat16?"),
        ({"dtype": torch.int8}, "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ({"speculative_algorithm": "EAGLE-3"}, "got 'EAGLE-3'; did you mean EAGLE3?"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be int requests, got '4'"),
        ({"disable_radix_cache": "yes"}, "enable_prefix_cache must be bool, got 'yes'"),
    ],
)
def test_near_misses_get_a_suggestion(asked, text):
    with pytest.raises(ConfigError) as caught:
        engine_options(asked)
    assert text in str(caught.value)
