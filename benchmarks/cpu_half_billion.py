"""A model of the shape of Qwen2-0.5B with random weights, for cpu_vs_transformers.

Decode of one request and prefill of one prompt, in bfloat16.  Checked first: log-probabilities of
tokens are as near to those of transformers in float32 as transformers' own in bfloat16 are, up to a
factor of two.
"""

import random
import tempfile

import torch
import transformers
from torch import Tensor

from cpu_peers import PLAIN, Peer, Row, Workload, in_turns, row_of
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

SEED = 20_261_123
PROMPT = 128  # tokens
OUTPUT = 32  # tokens behind the first
CHECKED = 4  # tokens
TOP = 20  # tokens whose log-probabilities are compared at each place
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def write_checkpoint(folder: str) -> None:
    """Random bfloat16 weights of that shape, biases included."""
    torch.manual_seed(SEED)
    config = transformers.Qwen2Config(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)


def check(llm: LLM, peer: Peer, prompt: list[int]) -> tuple[float, float]:
    """Largest errors of ours and of theirs, in natural logs of the likeliest tokens at each place;
    raises where ours is beyond twice theirs."""
    params = SamplingParams(temperature=0.0, max_tokens=CHECKED, ignore_eos=True, logprobs=TOP)
    output = llm.generate([prompt], params)[0].outputs[0]
    assert output.logprobs is not None
    ids = torch.tensor([place.top_ids for place in output.logprobs])
    mine = torch.tensor([place.top_values for place in output.logprobs])
    tokens = prompt + list(output.token_ids)
    theirs = _logprobs(peer, tokens, ids)
    peer.model.float()
    exact = _logprobs(peer, tokens, ids)
    peer.model.bfloat16()
    errors = float((mine - exact).abs().max()), float((theirs - exact).abs().max())
    if errors[0] > 2 * errors[1]:
        raise SystemExit(
            f"log-probabilities are {errors[0]:.3g} off, transformers' {errors[1]:.3g}"
        )
    return errors


def _logprobs(peer: Peer, tokens: list[int], ids: Tensor) -> Tensor:
    """[places, TOP] float32: of `ids` at the last places of `tokens`."""
    return peer.logits(tokens)[-len(ids) - 1 : -1].log_softmax(-1).gather(1, ids)


def measure_half_billion(threads: int, repeats: int) -> tuple[list[Row], tuple[float, float]]:
    """Both questions, and the errors of the check."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder)
        llm = LLM(folder, dtype="bfloat16", threads=threads, max_model_len=512, **PLAIN)
        peer = Peer(folder, torch.bfloat16)
    torch.set_num_threads(threads)
    source = random.Random(SEED)
    prompt = [source.randrange(SHAPE["vocab_size"]) for _ in range(PROMPT)]
    errors = check(llm, peer, prompt)
    first = in_turns(llm, peer, Workload([prompt], [1]), repeats)
    full = in_turns(llm, peer, Workload([prompt], [OUTPUT + 1]), repeats)
    llm.close()
    decode = [all_of_it - to_first for all_of_it, to_first in zip(full, first, strict=True)]
    rows = [
        row_of("0.5B: decode tokens/s, 1 request", "bfloat16", OUTPUT, decode),
        row_of(f"0.5B: prefill tokens/s, {PROMPT} tokens", "bfloat16", PROMPT, first),
    ]
    return rows, errors
