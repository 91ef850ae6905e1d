"""How far is a memory budget from what an engine takes: as planned, as rehearsed, as measured?

    PYTHONPATH=src python benchmarks/memory_budget.py --model llama-3.1-8b
    PYTHONPATH=src python benchmarks/memory_budget.py --model llama-3.1-8b \
        --draft eagle3-llama-3.1-8b --topk 4

Boots an engine with dummy weights, and rehearses the same on the meta device.  Weights and KV must
be equal, otherwise the script fails; the rest is to be no less than measured, and little more.
Planned are graphs with their reserve and nodes, and all that the allocator keeps of the steps.
Activations are the peak of one eager step over padded rows, behind one that loads its kernels.
Prints a table, then one JSON document as the last line.
"""

import argparse
import gc
import json
import platform
import sys
import time
from typing import Any

import torch

from paceline.attention.registry import load_backend
from paceline.cache.pool import KVFormat, torch_kv_dtype
from paceline.core.gpus import DeviceFacts
from paceline.core.options.engine_options import known
from paceline.llm.boot import Knobs, boot
from paceline.llm.prepare import Prepared, prepare
from paceline.plan.assemble import Decided, decide
from paceline.plan.memory.rehearsal import (
    RehearsedStep,
    allocated,
    graphs_held,
    largest_graphs,
    largest_steps,
    rehearse,
)
from paceline.runner.program import Parts
from paceline.runner.recording.graphs import AHEAD

MIB = 1 << 20
EXACT = ("weights", "draft weights", "KV")
MOST_OVER = 1.25  # times what was measured
UNSPLIT = 1 << 20  # bytes that the device counts of a piece whose rest is too small to be split off


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--draft", help="a draft model or head")
    parser.add_argument("--algorithm", help="NGRAM, EAGLE3, ...")
    parser.add_argument("--topk", type=int, help="width of the tree of drafts")
    parser.add_argument("--acceptance", help="sample-and-match or rejection")
    parser.add_argument("--backend", help="of attention")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int)
    return parser.parse_args()


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Engine options; what was not given is left open."""
    found = {
        "model": args.model,
        "load_format": "dummy",
        "attention_backend": args.backend,
        "speculative_draft_model_path": args.draft,
        "speculative_algorithm": args.algorithm or (None if args.draft else "off"),
        "speculative_eagle_topk": args.topk,
        "speculative_acceptance": args.acceptance,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
    }
    return {name: value for name, value in found.items() if value is not None}


def decided_of(prepared: Prepared) -> Decided:
    return decide(
        prepared.config,
        prepared.options,
        prepared.speculation,
        num_pages=tuple(group.num_pages for group in prepared.fit.groups),
        kv=KVFormat(dtype=torch_kv_dtype(known(prepared.options.kv_cache_dtype))),
        processors=prepared.admission.processors,
    )


def peak(parts: Parts, shape: RehearsedStep, facts: DeviceFacts) -> int:
    """Bytes that one eager step takes at most, as the device's allocator counts them."""
    here = allocated(parts, shape, facts)  # loads the kernels
    if facts.device_type == "cpu":
        return here.peak
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    allocated(parts, shape, facts)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def name_of(shape: RehearsedStep) -> str:
    kind = "round" if shape.is_round else "scored prompt" if shape.scored else "step"
    return f"{kind} of {shape.size.reqs} x {shape.size.tokens}"


def main() -> int:
    prepared = prepare(asked(options()))
    facts, fit, decided = prepared.device, prepared.fit, decided_of(prepared)
    tokens, context = decided.limits.max_tokens, decided.limits.context_len
    if context < tokens:  # one padded row holds all tokens of a step
        sys.exit(f"--max-model-len must be at least {tokens}, the tokens of a step, got {context}")
    backend = load_backend(prepared.attention.name)
    if backend.capabilities.host_plan:
        sys.exit("a backend that plans on the host is not rehearsed; add --backend triton")
    began = time.process_time()
    seen = rehearse(decided, backend, facts)
    steps = largest_steps(decided.limits)
    rehearsed = [allocated(seen.parts, shape, facts).peak for shape in steps]
    graphs, _ = graphs_held(seen.parts, largest_graphs(decided.limits), facts)
    cpu_s = time.process_time() - began

    booted = boot(prepared, knobs=Knobs(capture=AHEAD))
    measured = booted.measured
    parts = booted.runner.parts
    rows = [
        ("weights", fit.weights_bytes, seen.weights, measured["weights"]),
        (
            "draft weights",
            fit.draft_weights_bytes,
            seen.draft_weights,
            measured.get("draft weights", 0),
        ),
        ("KV", fit.kv_bytes, seen.kv, measured["KV"]),
        ("workspace", fit.workspace_bytes, seen.workspace, measured["workspace"]),
        ("graphs", fit.graphs_bytes, graphs, measured["graphs"]),
    ]
    rows += [
        (name_of(shape), fit.activations_bytes, expected, peak(parts, shape, facts))
        for shape, expected in zip(steps, rehearsed, strict=True)
    ]
    print(f"{prepared.source.name} on {facts.name}, {prepared.attention.name}, torch", end=" ")
    print(f"{torch.__version__}; rehearsed in {cpu_s:.2f} s of CPU time; MiB")
    print(f"{'':28}{'planned':>12}{'rehearsed':>12}{'measured':>12}{'rehearsed/measured':>20}")
    for name, planned, expected, found in rows:
        sizes = "".join(f"{size / MIB:12.1f}" for size in (planned, expected, found))
        print(f"{name:28}{sizes}{expected / found if found else 1.0:20.3f}")
    faults = [
        name
        for name, _, expected, found in rows
        if not (
            expected == found if name in EXACT else found - UNSPLIT <= expected <= MOST_OVER * found
        )
    ]
    print(f"outside of what is wanted: {', '.join(faults) or 'none'}")
    document = {
        "model": prepared.source.name,
        "device": facts.name,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rehearsed_cpu_s": cpu_s,
        "bytes": {
            name: {"planned": planned, "rehearsed": expected, "measured": found}
            for name, planned, expected, found in rows
        },
        "faults": faults,
    }
    print(json.dumps(document))
    return int(any(name in EXACT for name in faults))


if __name__ == "__main__":
    sys.exit(main())
