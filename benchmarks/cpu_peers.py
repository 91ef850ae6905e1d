"""What the CPU benchmarks share: paceline and transformers on the same requests, timed in turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

PLAIN = {"enable_prefix_cache": False, "speculative_algorithm": "off"}


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids and how many tokens each asks for."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)


@dataclass(frozen=True, slots=True)
class Row:
    """One question in one dtype; rates are the best of the repeats."""

    question: str
    dtype: str
    paceline_tok_s: float
    transformers_tok_s: float
    ratio: float


def row_of(question: str, dtype: str, tokens: int, seconds: list[float]) -> Row:
    """A row of `tokens` in the seconds of both, ours first."""
    mine, theirs = (tokens / each for each in seconds)
    return Row(question, dtype, mine, theirs, mine / theirs)


class Peer:
    """transformers' model with its own generate."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None  # both run to the length asked for

    @torch.inference_mode()
    def generate(self, work: Workload) -> list[list[int]]:
        """Greedy tokens of each request, cut to what it asked for."""
        width = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in work.prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts])
        longest = max(work.output_lens)
        tokens = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        rows = tokens[:, width:].tolist()
        return [row[:length] for row, length in zip(rows, work.output_lens, strict=True)]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] float32."""
        return self.model(torch.tensor([tokens])).logits[0].float()


def ours(llm: LLM, work: Workload) -> list[list[int]]:
    """Greedy tokens of each request."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in work.output_lens
    ]
    outputs = llm.generate(work.prompts, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def in_turns(llm: LLM, peer: Peer, work: Workload, repeats: int) -> list[float]:
    """Best seconds of both on `work`, run in turn so that a slow moment hits both.

    Of one thread seconds of the process, which a busy machine does not stretch; of several, of the
    clock.  A first run of each is not timed: graphs are captured on an early use of a size.
    """
    runs: list[Callable[[], object]] = [lambda: ours(llm, work), lambda: peer.generate(work)]
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(runs)
    for repeat in range(repeats + 1):
        for index, run in enumerate(runs):
            began = clock()
            run()
            if repeat:
                best[index] = min(best[index], clock() - began)
    return best
