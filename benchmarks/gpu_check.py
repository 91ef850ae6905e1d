"""The engine on a GPU, correctness only: graphs, streams and kernels against the CPU's plain path.

    python benchmarks/gpu_check.py

With the bundled model: greedy tokens with graphs equal those without, the overlapped loop equals
its twin, both equal the CPU's `torch` backend in fp32 up to ties that are shown, and a whole
generation runs under `torch.cuda.set_sync_debug_mode("error")`.  Exits 1 when a check fails.  The
last line is JSON.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.machine import versions

SEED = 7
TIE_GAP = 1e-3  # of log-probabilities in fp32, at the first difference
NUM_PROMPTS = 24
Tokens = list[tuple[int, ...]]


def prompts(vocab_size: int) -> list[list[int]]:
    """Random ids of ragged lengths, some sharing a prefix."""
    source = random.Random(SEED)
    shared = [source.randrange(1, vocab_size) for _ in range(80)]
    made = []
    for index in range(NUM_PROMPTS):
        tail = [source.randrange(1, vocab_size) for _ in range(source.randint(1, 200))]
        made.append(shared + tail if index % 3 == 0 else tail)
    return made


def run(params: SamplingParams, **options: Any) -> tuple[Tokens, LLM]:
    """Tokens of every prompt, twice in one engine, so that graphs are replayed."""
    llm = LLM("bundled", max_num_seqs=16, max_num_batched_tokens=256, **options)
    work = prompts(llm.tokenizer.vocab_size)
    llm.generate(work, params)
    with no_sync(options.get("device") == "cuda"):
        outputs = llm.generate(work, params)
    return [output.outputs[0].token_ids for output in outputs], llm


@contextmanager
def no_sync(is_cuda: bool) -> Iterator[None]:
    """On CUDA, any implicit host synchronisation raises."""
    if not is_cuda:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def first_differences(a: Tokens, b: Tokens) -> list[tuple[int, int]]:
    """(request, output index) of the first difference of each request that has one."""
    return [
        (request, next(i for i, (x, y) in enumerate(zip(mine, other, strict=True)) if x != y))
        for request, (mine, other) in enumerate(zip(a, b, strict=True))
        if mine != other
    ]


def gap_at(llm: LLM, work: list[list[int]], tokens: Tokens, where: tuple[int, int]) -> float:
    """Log-probability gap of the two best tokens at the first difference."""
    request, index = where
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    context = work[request] + list(tokens[request][:index])
    row = llm.generate([context], params)[0].outputs[0].logprobs
    assert row is not None
    return abs(row[0].top_values[0] - row[0].top_values[1])


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=48, ignore_eos=True)
    checks: list[dict[str, Any]] = []

    def note(name: str, passed: bool, detail: str = "") -> None:
        checks.append({"check": name, "passed": passed, "detail": detail})
        print(f"{'ok  ' if passed else 'FAIL'} {name} {detail}", flush=True)

    truth, cpu = run(greedy, device="cpu", dtype="float32")
    for dtype in ("float32", "bfloat16"):
        for name, params in (("greedy", greedy), ("sampled", sampled)):
            graphs, llm = run(params, device="cuda", dtype=dtype)
            events = llm.report()["events"]
            llm.close()
            eager, llm = run(params, device="cuda", dtype=dtype, enforce_eager=True)
            llm.close()
            differ = first_differences(graphs, eager)
            note(f"{dtype} {name}: graphs equal eager", not differ, f"{differ} {events}")
        twin, llm = run(sampled, device="cuda", dtype=dtype, overlap=False)
        llm.close()
        note(f"{dtype} sampled: twin equals overlapped", twin == graphs)
        # Without prefix hits, whose length depends on the page size, not a bit may change.
        by_size = []
        for page_size in (1, 16, 64):
            options = {"page_size": page_size, "enable_prefix_cache": False}
            tokens, llm = run(sampled, device="cuda", dtype=dtype, **options)
            llm.close()
            by_size.append(tokens)
        note(f"{dtype} sampled: page sizes 1, 16, 64", by_size[0] == by_size[1] == by_size[2])
    on_gpu, llm = run(greedy, device="cuda", dtype="float32")
    llm.close()
    work = prompts(cpu.tokenizer.vocab_size)
    gaps = [gap_at(cpu, work, truth, where) for where in first_differences(on_gpu, truth)]
    note(
        "float32 greedy: GPU equals CPU up to ties", all(g < TIE_GAP for g in gaps), f"gaps {gaps}"
    )
    document = {
        "benchmark": "gpu_check",
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "sync_debug_mode": "error during every second generation on CUDA",
        "checks": checks,
    }
    print(json.dumps(document))
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
