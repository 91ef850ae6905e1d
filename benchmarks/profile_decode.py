"""Where a step's time goes on a GPU: kernels by role, with bytes and share of the limit, and idle.

    python benchmarks/profile_decode.py --model llama-3.1-8b --load-format dummy --batch-size 64
    python benchmarks/profile_decode.py --phase prefill --batch-size 1 --input-len 1024

Profiles graph replays of steady decode, or the steps that compute whole prompts, after checking
that two runs of a prompt agree.  Prints a table per role (profile_table.py) and one per kernel, the
time the device idles within a step and between two, and one JSON document as the last line.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.bench.latency import random_prompts
from paceline.bench.page import page, profile_bars
from paceline.core.errors import IntegrityError
from paceline.core.options.engine_options import known
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.models.quantized.kept import MADE
from paceline.plan.machine import versions
from profile_table import Kernel, idle, own_times, role_rows, show, split_steps
from profile_work import Work, step_limit_us

DECODE_STEPS = 20
PREFILL_STEPS = 5
LISTED = 24  # kernels


def main() -> None:
    args = parse_arguments()
    is_prefill = args.phase == "prefill"
    llm = LLM(
        args.model,
        load_format=args.load_format,
        device="cuda",
        max_num_seqs=args.batch_size,
        max_num_batched_tokens=args.batch_size * args.input_len if is_prefill else None,
        enable_prefix_cache=False,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
    )
    require_steady(llm, args)
    if is_prefill:
        events, kv_len = profile_prefill(llm, args), args.input_len
        steps = split_steps(events, PREFILL_STEPS)
    else:
        events, kv_len = profile_decode(llm, args)
        steps = split_steps(events, DECODE_STEPS)
    document = report(llm, args, steps, kv_len=kv_len)
    llm.close()
    if args.html is not None:
        title = f"{document['benchmark']} on {document['device']}"
        args.html.write_text(page(title, document, profile_bars(document)), encoding="utf-8")
    print(json.dumps(document))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phase", default="decode", choices=("decode", "prefill"))
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--kv-cache-dtype", default=None)
    parser.add_argument("--quantization", default=None, choices=MADE, help="of dummy weights")
    parser.add_argument("--batch-size", type=int, default=None, help="64, or 1 for prefill")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--html", type=Path, default=None, help="draw the result on this page")
    args = parser.parse_args()
    args.batch_size = args.batch_size or (64 if args.phase == "decode" else 1)
    return args


def require_steady(llm: LLM, args: argparse.Namespace) -> None:
    """Raises IntegrityError when two greedy runs of one prompt differ."""
    prompt = random_prompts(1, args.input_len, llm.prepared.config.vocab_size, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=2 * DECODE_STEPS, ignore_eos=True)
    first, again = (llm.generate(prompt, params)[0].outputs[0].token_ids for _ in range(2))
    if first != again:
        raise IntegrityError("two greedy runs of one prompt differ; do not trust this profile")


def profile_decode(llm: LLM, args: argparse.Namespace) -> tuple[list[Kernel], int]:
    """(kernels of DECODE_STEPS steady steps, keys of a request about half-way through them)."""
    prompts = random_prompts(
        args.batch_size, args.input_len, llm.prepared.config.vocab_size, seed=1
    )
    params = SamplingParams(temperature=0.0, max_tokens=8 * DECODE_STEPS, ignore_eos=True)
    stream = llm.generate(prompts, params, stream=True)
    longest = 0
    for output in stream:
        longest = max(longest, len(output.outputs[0].token_ids))
        if longest >= 2 * DECODE_STEPS:
            break
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(DECODE_STEPS):
            llm.engine.step()
        torch.cuda.synchronize()
    stream.close()
    return kernels_of(profiler), args.input_len + longest + DECODE_STEPS // 2


def profile_prefill(llm: LLM, args: argparse.Namespace) -> list[Kernel]:
    """Kernels of PREFILL_STEPS steps, each of which computes a whole batch of prompts."""
    vocab_size = llm.prepared.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for seed in (2, 3):
        llm.generate(random_prompts(args.batch_size, args.input_len, vocab_size, seed=seed), params)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for seed in range(4, 4 + PREFILL_STEPS):
            prompts = random_prompts(args.batch_size, args.input_len, vocab_size, seed=seed)
            llm.generate(prompts, params)
            torch.cuda.synchronize()
    return kernels_of(profiler)


def kernels_of(profiler: Any) -> list[Kernel]:
    """What the device executed."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def report(
    llm: LLM, args: argparse.Namespace, steps: list[list[Kernel]], *, kv_len: int
) -> dict[str, Any]:
    """Print both tables; returns the JSON document."""
    facts, options, config = llm.prepared.device, llm.prepared.options, llm.prepared.config
    peaks = {"bandwidth": facts.bandwidth_bytes_s, "flops": facts.matmul_flops}
    tokens = args.batch_size * (args.input_len if args.phase == "prefill" else 1)
    work = Work(
        phase=args.phase,
        requests=args.batch_size,
        tokens=tokens,
        kv_len=kv_len,
        dtype=known(options.dtype),
        kv_dtype=known(options.kv_cache_dtype),
        packing=None if args.quantization is None else MADE[args.quantization],
    )
    roles = role_rows(steps, config, work, **peaks)
    rows, idles = kernel_rows(steps), idle(steps)
    limit_us = step_limit_us(config, work, **peaks)
    print(f"{args.phase}: {args.batch_size} requests, {tokens} tokens, {kv_len} keys each")
    print(show(roles))
    print(f"\n{'calls':>7}{'us/step':>10}{'share':>8}  kernel")
    for row in rows[:LISTED]:
        print(
            f"{row['calls_per_step']:>7.1f}{row['us_per_step']:>10.1f}{row['share']:>8.1%}"
            f"  {row['kernel'][:90]}"
        )
    print(idles.line(limit_us))
    return {
        "benchmark": "profile",
        "phase": args.phase,
        "device": facts.name,
        "bandwidth_bytes_s": facts.bandwidth_bytes_s,
        "matmul_flops": facts.matmul_flops,
        "versions": versions(),
        "model": args.model,
        "quantization": args.quantization,
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "kv_len": kv_len,
        "steps": len(steps),
        "limit_us_per_step": limit_us,
        **asdict(idles),
        "roles": roles,
        "kernels": rows,
    }


def kernel_rows(steps: list[list[Kernel]]) -> list[dict[str, Any]]:
    """One row per kernel name: calls and microseconds per step, most time first."""
    calls: dict[str, int] = defaultdict(int)
    micros: dict[str, float] = defaultdict(float)
    for step in steps:
        for kernel, own in zip(step, own_times(step), strict=True):
            calls[kernel.name] += 1
            micros[kernel.name] += own
    total = sum(micros.values())
    rows = [
        {
            "kernel": name,
            "calls_per_step": calls[name] / len(steps),
            "us_per_step": micros[name] / len(steps),
            "share": micros[name] / total,
        }
        for name in calls
    ]
    return sorted(rows, key=lambda row: -row["us_per_step"])


if __name__ == "__main__":
    main()
