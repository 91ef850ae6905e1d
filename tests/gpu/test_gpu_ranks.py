"""Two GPUs share a model: their text is that of one; a rank that is killed ends both, and nothing
of them stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_cases import CONTEXT, VOCAB, save_tokenizer

from paceline.core.errors import PacelineError
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "llama": lambda sizes: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes)),
    "qwen3_moe": lambda sizes: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES | sizes, **EXPERTS)
    ),
}
PROMPTS = [[(7 * row + 3 * place) % 150 + 5 for place in range(9 + 11 * row)] for row in range(6)]
REPEATED = [[5, 6, 7, 8] * 6, [9, 10] * 9]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=40, ignore_eos=True),
]


def save(name: str, folder: Path, **sizes: int) -> None:
    torch.manual_seed(5)
    model = MODELS[name](sizes)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def make(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder),
        device="cuda",
        dtype="float32",
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        **options,
    )


def texts(llm: LLM) -> list[tuple[int, ...]]:
    found = [llm.generate(PROMPTS + REPEATED, params) for params in PARAMS]
    return [tuple(each.outputs[0].token_ids) for outputs in found for each in outputs]


@pytest.mark.parametrize("drafts", ["off", "NGRAM"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_two_gpus_say_what_one_says(tmp_path: Path, name: str, eager: bool, drafts: str) -> None:
    save(name, tmp_path)
    options = {"enforce_eager": eager, "speculative_algorithm": drafts}
    with make(tmp_path, **options) as one:
        wanted = texts(one)
    with make(tmp_path, tensor_parallel_size=2, **options) as two:
        assert texts(two) == wanted


def test_a_rank_that_is_killed_ends_all_and_leaves_no_memory(tmp_path: Path) -> None:
    save("llama", tmp_path, vocab_size=1 << 17)  # gathered through more channels than sums take
    free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    llm = make(tmp_path, tensor_parallel_size=2)
    ranks = llm._live.ranks
    assert ranks is not None
    stream = llm.generate(PROMPTS, PARAMS[0], stream=True)
    next(stream)
    os.kill(ranks.pids[0], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PacelineError, match=r"^rank 1 of the model .* ended: by SIGKILL"):
        list(stream)
    assert time.monotonic() - began < 5
    llm.close()
    del stream, llm
    torch.cuda.empty_cache()
    deadline = time.monotonic() + 5
    while torch.cuda.mem_get_info(1)[0] < free[1] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert torch.cuda.mem_get_info(1)[0] >= free[1]


def test_sums_are_the_definition_whatever_their_sizes() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "all_reduce.py"
    command = [sys.executable, str(script), "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
