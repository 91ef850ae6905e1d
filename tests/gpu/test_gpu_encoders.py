"""An encoder, whose layers cache nothing, on a GPU."""

import pytest
import torch

from paceline.llm.llm import LLM

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TEXTS = [[(7 * row + 3 * place) % 900 + 5 for place in range(3 + 11 * row)] for row in range(4)]


def test_vectors_of_a_gpu_are_those_of_a_cpu() -> None:
    vectors = []
    for device in ("cpu", "cuda"):
        options = {"device": device, "load_format": "dummy", "dtype": "float32"}
        with LLM("bert-base", max_num_seqs=4, **options) as llm:
            found = llm.embed(TEXTS, use_tqdm=False)
            vectors.append(torch.stack([torch.as_tensor(each.vector) for each in found]))
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-3, atol=1e-4)
