"""Decode rate on the CPU against transformers' `generate`: same model, threads and dtype, one run.

    python benchmarks/cpu_vs_transformers.py --threads 2

Two questions, in bf16 and fp32: decode tokens/s of one request, and total tokens/s of 16 ragged
requests (prompts and outputs of 16 to 256 tokens from a committed seed).  transformers gets the 16
as one static batch, left-padded, run to the longest output; only tokens that were asked for count.
Correctness first: in fp32 both must produce the same greedy tokens, up to ties that are shown.
Ratios compare the best of interleaved repeats.  Needs the `hf` extra.  The last line is JSON.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.core.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.models.locate import locate
from paceline.plan.machine import cpu_facts, versions

SEED = 20_261_120
NUM_REQUESTS = 16
SHORTEST, LONGEST = 16, 256  # tokens, of prompts and of outputs
SINGLE_OUTPUT = 128  # tokens of the single request
TIE_GAP = 1e-3  # fp32 logits; a first difference with a larger gap fails the benchmark


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


def ragged_workload(text_ids: list[int]) -> Workload:
    """The 16 requests: slices of a source file, lengths from the committed seed."""
    source = random.Random(SEED)
    prompts, lens = [], []
    for _ in range(NUM_REQUESTS):
        length = source.randint(SHORTEST, LONGEST)
        start = source.randrange(len(text_ids) - length)
        prompts.append(text_ids[start : start + length])
        lens.append(source.randint(SHORTEST, LONGEST))
    return Workload(prompts, lens)


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
    def gap(self, tokens: list[int], ours: int, theirs: int) -> float:
        """|logit of ours - logit of theirs| after `tokens`."""
        logits = self.model(torch.tensor([tokens])).logits[0, -1].float()
        return float((logits[ours] - logits[theirs]).abs())


def ours(llm: LLM, work: Workload) -> list[list[int]]:
    """Greedy tokens of each request."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in work.output_lens
    ]
    outputs = llm.generate(work.prompts, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(
    peer: Peer, work: Workload, mine: list[list[int]], theirs: list[list[int]]
) -> list[float]:
    """Logit gaps at the first difference of each request that has one; raises above TIE_GAP."""
    gaps = []
    for prompt, a, b in zip(work.prompts, mine, theirs, strict=True):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        gap = peer.gap(prompt + a[:at], a[at], b[at])
        if gap > TIE_GAP:
            raise SystemExit(f"tokens differ at output {at} with a logit gap of {gap:.3g}")
        gaps.append(gap)
    return gaps


def best_seconds(functions: list[Callable[[], object]], repeats: int) -> list[float]:
    """The best time of each, run in turn so that a slow moment hits both."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for index, function in enumerate(functions):
            began = time.perf_counter()
            function()
            best[index] = min(best[index], time.perf_counter() - began)
    return best


def measure(dtype: str, threads: int, repeats: int) -> tuple[list[Row], list[float]]:
    """Both questions in one dtype."""
    folder = str(locate("bundled").folder)
    plain = {"enable_prefix_cache": False, "speculative_algorithm": "off"}
    llm = LLM("bundled", dtype=dtype, threads=threads, **plain)
    peer = Peer(folder, getattr(torch, dtype))
    torch.set_num_threads(threads)
    text_ids = llm.tokenizer.encode(Path(random.__file__).read_text())
    ragged = ragged_workload(text_ids)
    gaps: list[float] = []
    if dtype == "float32":
        gaps = check(peer, ragged, ours(llm, ragged), peer.generate(ragged))

    def run(work: Workload) -> list[float]:
        pair = [lambda: ours(llm, work), lambda: peer.generate(work)]
        best_seconds(pair, 1)  # warm-up: graphs are captured on the second use of a size
        return best_seconds(pair, repeats)

    one = Workload(ragged.prompts[:1], [1])
    single = Workload(ragged.prompts[:1], [SINGLE_OUTPUT + 1])
    decode = [full - first for full, first in zip(run(single), run(one), strict=True)]
    total = run(ragged)
    llm.close()
    rows = [
        _row("decode tokens/s, 1 request", dtype, SINGLE_OUTPUT, decode),
        _row("total tokens/s, 16 ragged requests", dtype, ragged.output_tokens, total),
    ]
    return rows, gaps


def _row(question: str, dtype: str, tokens: int, seconds: list[float]) -> Row:
    mine, theirs = (tokens / each for each in seconds)
    return Row(question, dtype, mine, theirs, mine / theirs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of both (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each (default 3)")
    parser.add_argument("--dtype", default="float32,bfloat16", help="comma-separated dtypes")
    args = parser.parse_args()
    document: dict[str, Any] = {
        "benchmark": "cpu_vs_transformers",
        "cpu": cpu_facts().name,
        "threads": args.threads,
        "versions": versions(),
        "seed": SEED,
        "rows": [],
    }
    print(f"{'question':<38}{'dtype':<10}{'paceline':>10}{'transformers':>14}{'ratio':>8}")
    for dtype in args.dtype.split(","):
        rows, gaps = measure(dtype, args.threads, args.repeats)
        if dtype == "float32":
            document["ties"] = gaps
            print(f"greedy tokens equal but for {len(gaps)} ties, logit gaps {gaps}")
        for row in rows:
            print(
                f"{row.question:<38}{row.dtype:<10}{row.paceline_tok_s:>10.1f}"
                f"{row.transformers_tok_s:>14.1f}{row.ratio:>8.2f}"
            )
            document["rows"].append(asdict(row))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
