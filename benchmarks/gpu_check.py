"""The engine on a GPU, correctness only: graphs, streams and kernels against the CPU's plain path.

    python benchmarks/gpu_check.py

With the bundled model: greedy tokens with graphs equal those without, the overlapped loop equals
its twin, both equal the CPU's `torch` backend in fp32 up to ties that are shown, and a whole
generation runs under `torch.cuda.set_sync_debug_mode("error")`.  Exits 1 when a check fails.  The
last line is JSON.  tests/gpu runs the same checks.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.llm.prepare import Prepared
from paceline.plan.machine import versions

SEED = 7
TIE_GAP = 1e-3  # of log-probabilities in fp32, at the first difference
NUM_PROMPTS = 24
PAGE_SIZES = (1, 16, 64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=48, ignore_eos=True)
Tokens = list[tuple[int, ...]]
Outcome = tuple[bool, str]  # passed, detail


def prompts(vocab_size: int) -> list[list[int]]:
    """Random ids of ragged lengths, some sharing a prefix."""
    source = random.Random(SEED)
    shared = [source.randrange(1, vocab_size) for _ in range(80)]
    made = []
    for index in range(NUM_PROMPTS):
        tail = [source.randrange(1, vocab_size) for _ in range(source.randint(1, 200))]
        made.append(shared + tail if index % 3 == 0 else tail)
    return made


def answer(params: SamplingParams, **options: Any) -> tuple[Tokens, Prepared]:
    """Tokens of every prompt and what the engine is; run twice, so that graphs are replayed."""
    plain = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "speculative_algorithm": "off"}
    with LLM("bundled", **plain | options) as llm:
        work = prompts(llm.prepared.config.vocab_size)
        llm.generate(work, params)
        with no_sync(options.get("device") == "cuda"):
            outputs = llm.generate(work, params)
        return [output.outputs[0].token_ids for output in outputs], llm.prepared


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


def graphs_equal_eager(dtype: str, params: SamplingParams) -> Outcome:
    """Tokens with graphs are those without."""
    graphs, prepared = answer(params, device="cuda", dtype=dtype)
    eager, _ = answer(params, device="cuda", dtype=dtype, enforce_eager=True)
    differ = first_differences(graphs, eager)
    return not differ, f"{differ} {prepared.events.counts()}"


def twin_equals_overlapped(dtype: str) -> Outcome:
    """The two loops give the same bits."""
    overlapped, _ = answer(SAMPLED, device="cuda", dtype=dtype)
    twin, _ = answer(SAMPLED, device="cuda", dtype=dtype, overlap=False)
    differ = first_differences(twin, overlapped)
    return not differ, f"{differ}"


def page_sizes_agree(dtype: str) -> Outcome:
    """Without prefix hits, whose length depends on the page size, not a bit may change."""
    options = {"device": "cuda", "dtype": dtype, "enable_prefix_cache": False}
    first, *others = (answer(SAMPLED, page_size=size, **options)[0] for size in PAGE_SIZES)
    differ = [first_differences(first, other) for other in others]
    return not any(differ), f"{differ}"


def gpu_equals_cpu() -> Outcome:
    """float32 greedy: equal, or parting where the CPU cannot tell the two best tokens apart."""
    on_gpu, _ = answer(GREEDY, device="cuda", dtype="float32")
    truth, prepared = answer(GREEDY, device="cpu", dtype="float32")
    work = prompts(prepared.config.vocab_size)
    with LLM("bundled", device="cpu", dtype="float32", speculative_algorithm="off") as cpu:
        gaps = [gap_at(cpu, work, truth, where) for where in first_differences(on_gpu, truth)]
    return all(gap < TIE_GAP for gap in gaps), f"gaps {gaps}"


def all_checks() -> dict[str, Callable[[], Outcome]]:
    """Every check by name."""
    checks: dict[str, Callable[[], Outcome]] = {}
    for dtype in ("float32", "bfloat16"):
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            checks[f"{dtype} {name}: graphs equal eager"] = partial(
                graphs_equal_eager, dtype, params
            )
        checks[f"{dtype} sampled: twin equals overlapped"] = partial(twin_equals_overlapped, dtype)
        checks[f"{dtype} sampled: page sizes 1, 16, 64"] = partial(page_sizes_agree, dtype)
    checks["float32 greedy: GPU equals CPU up to ties"] = gpu_equals_cpu
    return checks


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found: list[dict[str, Any]] = []
    for name, check in all_checks().items():
        passed, detail = check()
        found.append({"check": name, "passed": passed, "detail": detail})
        print(f"{'ok  ' if passed else 'FAIL'} {name} {detail}", flush=True)
    document = {
        "benchmark": "gpu_check",
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "sync_debug_mode": "error during every second generation on CUDA",
        "checks": found,
    }
    print(json.dumps(document))
    return 0 if all(check["passed"] for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
