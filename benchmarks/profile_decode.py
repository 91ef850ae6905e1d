"""Where a decode step's time goes on a GPU: kernels, their time and share, and the idle rest.

    python benchmarks/profile_decode.py --model llama-3.1-8b --load-format dummy --batch-size 64

Profiles graph replays of steady decode after checking that two runs of a prompt agree.  Prints a
table per kernel name (calls and µs per step, share) and one JSON document as the last line.
"""

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.core.errors import IntegrityError
from paceline.core.sampling_params import SamplingParams
from paceline.engine.bench_latency import random_prompts
from paceline.engine.llm import LLM
from paceline.engine.machine import versions

STEPS = 20


def kernel_rows(events: Any, steps: int) -> list[dict[str, Any]]:
    """One row per kernel name: calls and microseconds per step, most time first."""
    calls: dict[str, int] = defaultdict(int)
    micros: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls[event.name] += 1
            micros[event.name] += event.time_range.elapsed_us()
    total = sum(micros.values())
    rows = [
        {
            "kernel": name,
            "calls_per_step": calls[name] / steps,
            "us_per_step": micros[name] / steps,
            "share": micros[name] / total,
        }
        for name in calls
    ]
    return sorted(rows, key=lambda row: -row["us_per_step"])


def busy_us(events: Any) -> tuple[float, float]:
    """(busy, span) microseconds of the device over all its events."""
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, ranges[0][0]
    for start, end in ranges:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - ranges[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=1024)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        load_format=args.load_format,
        device="cuda",
        max_num_seqs=args.batch_size,
        enable_prefix_cache=False,
    )
    vocab_size = llm.report()["vocab_size"]
    work = random_prompts(args.batch_size, args.input_len, vocab_size, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=8 * STEPS, ignore_eos=True)
    first, again = (llm.generate(work[:1], params)[0].outputs[0].token_ids for _ in range(2))
    if first != again:
        raise IntegrityError("two greedy runs of one prompt differ; do not trust this profile")
    stream = llm.generate(work, params, stream=True)
    longest = 0
    for output in stream:
        longest = max(longest, len(output.outputs[0].token_ids))
        if longest >= 2 * STEPS:
            break
    engine = llm.engine
    torch.cuda.synchronize()
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    wall_us = 1e6 * (time.perf_counter() - began)
    events = profiler.events()
    rows = kernel_rows(events, STEPS)
    busy, span = busy_us(events)
    print(f"{'calls':>7}{'us/step':>10}{'share':>8}  kernel")
    for row in rows[:24]:
        print(
            f"{row['calls_per_step']:>7.1f}{row['us_per_step']:>10.1f}{row['share']:>8.1%}"
            f"  {row['kernel'][:90]}"
        )
    idle = 1 - busy / span
    print(f"device busy {busy / STEPS:.0f} of {span / STEPS:.0f} us/step, idle {idle:.1%}")
    document = {
        "benchmark": "profile_decode",
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "model": args.model,
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "steps": STEPS,
        "wall_us_per_step": wall_us / STEPS,
        "busy_us_per_step": busy / STEPS,
        "idle_share": idle,
        "kernels": rows,
    }
    stream.close()
    llm.close()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
