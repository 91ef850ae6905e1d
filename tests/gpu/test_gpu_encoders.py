"""Models whose steps hold every text whole, and whose layers cache nothing, on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_cases import VOCAB, save_tokenizer
from torch import Tensor

from paceline.llm.llm import LLM

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TEXTS = [[(7 * row + 3 * place) % 90 + 5 for place in range(3 + 11 * row)] for row in range(4)]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}


def vectors(folder: Path, device: str, **options: Any) -> Tensor:
    """[texts, hidden]"""
    asked = {"device": device, "dtype": "float32", "max_num_seqs": 4, **options}
    with LLM(str(folder), **asked) as llm:
        assert bool(llm.prepared.groups) == bool(options.get("enable_prefix_cache"))
        found = llm.embed(TEXTS, use_tqdm=False)
    return torch.stack([torch.as_tensor(each.vector) for each in found])


def test_vectors_of_a_gpu_are_those_of_a_cpu(tmp_path: Path) -> None:
    torch.manual_seed(5)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    ours, wanted = (vectors(tmp_path, device, pooling="mean") for device in ("cuda", "cpu"))
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_without_a_cache_makes_the_vectors_of_one_with(
    tmp_path: Path, dtype: str
) -> None:
    """Of heads of 128 columns, four to a KV head."""
    torch.manual_seed(6)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
    config = transformers.Qwen3Config(**SIZES | heads, initializer_range=0.1)
    transformers.Qwen3Model(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    wanted = vectors(tmp_path, "cpu")
    error = 1e-4 if dtype == "float32" else 3e-2
    for options in ({}, {"enforce_eager": True}, {"enable_prefix_cache": True}):
        ours = vectors(tmp_path, "cuda", dtype=dtype, **options)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=error)
