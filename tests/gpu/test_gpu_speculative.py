"""The whole engine with a drafter on a GPU: the text of plain decoding, on each backend."""

import importlib.util

import pytest

from paceline.plan.speculation import without_speculation
from paceline.proof.lossless.contest import contenders_of
from paceline.proof.lossless.prompt_set import read_prompts
from paceline.proof.lossless.proof import Outcome
from paceline.proof.lossless.prove import Trial, prove
from paceline.proof.lossless.report import table

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MODULES = {"flashinfer": "flashinfer", "fa4": "flash_attn"}
CHAIN = {"speculative_eagle_topk": 1}
TREE = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
DRAFTERS = {
    "EAGLE3": {"speculative_algorithm": "EAGLE3"},
    "STANDALONE": {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": "bundled",
    },
    "NGRAM": {"speculative_algorithm": "NGRAM"},
}


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("backend", "drafter"),
    [("triton", name) for name in DRAFTERS] + [("fa4", "EAGLE3"), ("flashinfer", "EAGLE3")],
)
def test_rounds_give_the_text_of_plain_decoding(
    backend: str, drafter: str, shape: dict[str, object]
) -> None:
    if backend in MODULES and importlib.util.find_spec(MODULES[backend]) is None:
        pytest.skip(f"{backend} needs {MODULES[backend]}")
    asked: dict[str, object] = {
        "model": "bundled",
        "device": "cuda",
        "dtype": "float16",
        "attention_backend": backend,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.4,
        **DRAFTERS[drafter],
        **shape,
    }
    trial = Trial(prompts=read_prompts(), max_tokens=96, temperature=0.8, top_p=0.95, seed=3)
    proof = prove(without_speculation(asked), contenders_of(asked, None), trial)
    print(table(proof))
    assert proof.outcome in (Outcome.EQUAL, Outcome.TIE), table(proof)
