"""An encoder, whose layers cache nothing, on a GPU."""

from pathlib import Path

import pytest
import torch
import transformers
from llm_cases import VOCAB, save_tokenizer

from paceline.llm.llm import LLM

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TEXTS = [[(7 * row + 3 * place) % 90 + 5 for place in range(3 + 11 * row)] for row in range(4)]


def test_vectors_of_a_gpu_are_those_of_a_cpu(tmp_path: Path) -> None:
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    vectors = []
    for device in ("cpu", "cuda"):
        options = {"device": device, "dtype": "float32", "pooling": "mean"}
        with LLM(str(tmp_path), max_num_seqs=4, **options) as llm:
            found = llm.embed(TEXTS, use_tqdm=False)
            vectors.append(torch.stack([torch.as_tensor(each.vector) for each in found]))
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-3, atol=1e-4)
