"""Where a round of speculation's time goes on a GPU: by segment and kernel, with idle time.

    python benchmarks/profile_round.py --model llama-3.1-8b --load-format dummy \
        --draft-model eagle3-llama-3.1-8b --force-accept-len 3 --batch-size 1

Profiles steady rounds, which are replays of one graph, after checking that two runs of a prompt
agree.  Forced acceptance says what the hardware does, not how good the drafts are.  Prints a row
per segment, a table per kernel, graph launches per round and the idle time within a round and
between two, and one JSON document as the last line.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.bench.latency import random_prompts
from paceline.bench.page import page, profile_bars
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.plan.machine import versions
from profile_decode import kernel_rows, kernels_of, require_steady
from profile_table import Kernel, idle, own_times

ROUNDS = 20
LISTED = 40  # kernels
# Each segment ends with the last kernel of its pattern, and verification where commit begins;
# what follows the last of them is observed.
SEGMENTS = (
    ("derive", r"^_derive_kernel"),
    ("propose", r"draft_topk|select_tree|ngram"),
    ("verify", None),
    ("commit", r"^_commit_kernel|compact_kv"),
)


def main() -> None:
    args = parse_arguments()
    llm = LLM(
        args.model,
        load_format=args.load_format,
        device="cuda",
        max_num_seqs=args.batch_size,
        enable_prefix_cache=False,
        attention_backend=args.attention_backend,
        speculative_algorithm=args.algorithm,
        speculative_draft_model_path=args.draft_model,
        speculative_num_steps=args.num_steps,
        speculative_eagle_topk=args.topk,
        speculative_num_draft_tokens=args.num_draft_tokens,
        force_accept_len=args.force_accept_len,
    )
    require_steady(llm, args)
    events, launches = profile_rounds(llm, args)
    document = report(llm, args, split_rounds(events), launches=launches)
    llm.close()
    if args.html is not None:
        title = f"{document['benchmark']} on {document['device']}"
        args.html.write_text(page(title, document, profile_bars(document)), encoding="utf-8")
    print(json.dumps(document))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--draft-model", default="eagle3-llama-3.1-8b")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--num-draft-tokens", type=int, default=None)
    parser.add_argument("--force-accept-len", type=float, default=None)
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--html", type=Path, default=None, help="draw the result on this page")
    return parser.parse_args()


def profile_rounds(llm: LLM, args: argparse.Namespace) -> tuple[list[Kernel], int]:
    """(kernels of ROUNDS steady rounds, graphs launched meanwhile)."""
    prompts = random_prompts(
        args.batch_size, args.input_len, llm.prepared.config.vocab_size, seed=1
    )
    params = SamplingParams(temperature=0.0, max_tokens=16 * ROUNDS, ignore_eos=True)
    stream = llm.generate(prompts, params, stream=True)
    for output in stream:
        if len(output.outputs[0].token_ids) >= 4 * ROUNDS:
            break
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(ROUNDS):
            llm.engine.step()
        torch.cuda.synchronize()
    launches = sum(event.name == "cudaGraphLaunch" for event in profiler.events())
    stream.close()
    return kernels_of(profiler), launches


def split_rounds(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each round, which begins with derive."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    starts = [i for i, kernel in enumerate(ordered) if re.search(SEGMENTS[0][1], kernel.name)]
    return [ordered[a:b] for a, b in pairwise([*starts, len(ordered)])]


def segment_rows(rounds: Sequence[Sequence[Kernel]]) -> list[dict[str, Any]]:
    """Kernels and busy microseconds of each segment, means over rounds."""
    calls: dict[str, int] = defaultdict(int)
    micros: dict[str, list[float]] = defaultdict(list)
    for kernels in rounds:
        times, names, start = own_times(kernels), [kernel.name for kernel in kernels], 0
        commit = next((i for i, name in enumerate(names) if "_commit_kernel" in name), len(names))
        for segment, pattern in SEGMENTS:
            stop = commit
            if pattern is not None:
                limit = commit if segment == "propose" else len(names)
                found = [i for i in range(limit) if re.search(pattern, names[i])]
                stop = max(start, found[-1] + 1) if found else start
            calls[segment] += stop - start
            micros[segment].append(sum(times[start:stop]))
            start = stop
        calls["observe"] += len(names) - start
        micros["observe"].append(sum(times[start:]))
    return [
        {
            "segment": segment,
            "kernels_per_round": calls[segment] / len(rounds),
            "us_per_round": statistics.mean(micros[segment]),
        }
        for segment in micros
    ]


def report(
    llm: LLM, args: argparse.Namespace, rounds: list[list[Kernel]], *, launches: int
) -> dict[str, Any]:
    """Print the tables; returns the JSON document."""
    prepared = llm.prepared
    segments, rows, idles = segment_rows(rounds), kernel_rows(rounds), idle(rounds)
    forced = args.force_accept_len
    how = "as sampled" if forced is None else f"forced to {forced:g} tokens per round"
    print(f"round: {args.batch_size} requests, {prepared.speculation}, acceptance {how}")
    for row in segments:
        print(
            f"{row['segment']:<10}{row['kernels_per_round']:>8.1f} kernels"
            f"{row['us_per_round']:>10.1f} us"
        )
    print(f"\n{'calls':>7}{'us/round':>10}{'share':>8}  kernel")
    for row in rows[:LISTED]:
        print(
            f"{row['calls_per_step']:>7.1f}{row['us_per_step']:>10.1f}{row['share']:>8.1%}"
            f"  {row['kernel'][:90]}"
        )
    print(idles.line(None))
    print(f"{launches / ROUNDS:.2f} graph launches per round")
    return {
        "benchmark": "profile-round",
        "device": prepared.device.name,
        "versions": versions(),
        "model": args.model,
        **prepared.to_json(),
        "forced_tokens_per_round": forced,
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "rounds": len(rounds),
        "graph_launches_per_round": launches / ROUNDS,
        **asdict(idles),
        "segments": segments,
        "kernels": rows,
    }


if __name__ == "__main__":
    main()
