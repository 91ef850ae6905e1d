"""Decode rate on the CPU against transformers' `generate`: same model, threads and dtype, one run.

    python benchmarks/cpu_vs_transformers.py --threads 2

Two questions of the bundled model, in bf16 and fp32: decode tokens/s of one request, and total
tokens/s of 16 ragged requests (prompts and outputs of 16 to 256 tokens from a committed seed).
transformers gets the 16 as one static batch, left-padded, run to the longest output; only tokens
that were asked for count.  Then decode and prefill of a 0.5B model (cpu_half_billion.py), in bf16.
Correctness first: in fp32 both must produce the same greedy tokens, up to ties that are shown; of
the 0.5B model log-probabilities are compared.  Ratios compare the best of interleaved repeats:
seconds of the process with one thread, of the clock with more.  Needs the `hf` extra.  The last
line is JSON.
"""

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cpu_half_billion import measure_half_billion
from cpu_peers import PLAIN, Peer, Row, Workload, in_turns, ours, row_of
from paceline.llm.llm import LLM
from paceline.models.locate import locate
from paceline.plan.machine import cpu_facts, versions

SEED = 20_261_120
NUM_REQUESTS = 16
SHORTEST, LONGEST = 16, 256  # tokens, of prompts and of outputs
SINGLE_OUTPUT = 128  # tokens of the single request
TIE_GAP = 1e-3  # fp32 logits; a first difference with a larger gap fails the benchmark


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


def check(
    peer: Peer, work: Workload, mine: list[list[int]], theirs: list[list[int]]
) -> list[float]:
    """Logit gaps at the first difference of each request that has one; raises above TIE_GAP."""
    gaps = []
    for prompt, a, b in zip(work.prompts, mine, theirs, strict=True):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = peer.logits(prompt + a[:at])[-1]
        gap = float((logits[a[at]] - logits[b[at]]).abs())
        if gap > TIE_GAP:
            raise SystemExit(f"tokens differ at output {at} with a logit gap of {gap:.3g}")
        gaps.append(gap)
    return gaps


def measure(dtype: str, threads: int, repeats: int) -> tuple[list[Row], list[float]]:
    """Both questions in one dtype."""
    folder = str(locate("bundled").folder)
    llm = LLM("bundled", dtype=dtype, threads=threads, **PLAIN)
    peer = Peer(folder, getattr(torch, dtype))
    torch.set_num_threads(threads)
    text_ids = llm.tokenizer.encode(Path(random.__file__).read_text())
    ragged = ragged_workload(text_ids)
    gaps: list[float] = []
    if dtype == "float32":
        gaps = check(peer, ragged, ours(llm, ragged), peer.generate(ragged))

    one = Workload(ragged.prompts[:1], [1])
    single = Workload(ragged.prompts[:1], [SINGLE_OUTPUT + 1])
    full, first = (in_turns(llm, peer, work, repeats) for work in (single, one))
    decode = [all_of_it - to_first for all_of_it, to_first in zip(full, first, strict=True)]
    total = in_turns(llm, peer, ragged, repeats)
    llm.close()
    rows = [
        row_of("decode tokens/s, 1 request", dtype, SINGLE_OUTPUT, decode),
        row_of("total tokens/s, 16 ragged requests", dtype, ragged.output_tokens, total),
    ]
    return rows, gaps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of both (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each (default 3)")
    parser.add_argument("--dtype", default="float32,bfloat16", help="comma-separated dtypes")
    parser.add_argument("--bundled-only", action="store_true", help="leave the 0.5B model out")
    args = parser.parse_args()
    document: dict[str, Any] = {
        "benchmark": "cpu_vs_transformers",
        "cpu": cpu_facts().name,
        "threads": args.threads,
        "seconds": "of the process" if args.threads == 1 else "of the clock",
        "versions": versions(),
        "seed": SEED,
        "rows": [],
    }
    print(f"{'question':<38}{'dtype':<10}{'paceline':>10}{'transformers':>14}{'ratio':>8}")
    for dtype in filter(None, args.dtype.split(",")):
        rows, gaps = measure(dtype, args.threads, args.repeats)
        if dtype == "float32":
            document["ties"] = gaps
            print(f"greedy tokens equal but for {len(gaps)} ties, logit gaps {gaps}")
        tell(rows, document)
    if not args.bundled_only:
        rows, (mine, theirs) = measure_half_billion(args.threads, args.repeats)
        print(f"0.5B: log-probabilities {mine:.3g} off float32, transformers' {theirs:.3g}")
        document["half_billion_errors"] = [mine, theirs]
        tell(rows, document)
    print(json.dumps(document))


def tell(rows: list[Row], document: dict[str, Any]) -> None:
    """Print rows, and add them to the document."""
    for row in rows:
        print(
            f"{row.question:<38}{row.dtype:<10}{row.paceline_tok_s:>10.1f}"
            f"{row.transformers_tok_s:>14.1f}{row.ratio:>8.2f}",
            flush=True,
        )
        document["rows"].append(asdict(row))


if __name__ == "__main__":
    main()
