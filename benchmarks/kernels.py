"""How fast are the Triton kernels, and are they right?

    PYTHONPATH=src python benchmarks/kernels.py
    PYTHONPATH=src python benchmarks/kernels.py --tune

Every kernel first passes kernels_gate.py or attention_gate.py; one that does not is not timed and
the exit status is 1.
Times are the median over replays of a CUDA graph that holds enough launches on different pages to
exceed the L2 cache; decode is judged by the bytes of K and V it must read.  A table for people,
then one JSON document as the last line.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from attention_gate import check_attention, check_replay
from kernels_gate import Failure, check_small_ops
from kernels_timed import Work, attention_works, small_works, tuning_works

COPY_BYTES_S = 4.23e12  # measured copy bandwidth of an H200, the ceiling for memory-bound kernels
MATMUL_FLOPS = 989e12  # dense bf16 peak of the same


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed kernel."""

    op: str
    label: str
    us: float  # median microseconds of one launch
    spread: float  # (slowest - fastest) / median over the repetitions
    gb_s: float | None
    tflop_s: float | None
    share: float  # of COPY_BYTES_S or MATMUL_FLOPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short gate, for a smoke run")
    parser.add_argument("--gate-only", action="store_true", help="check, do not time")
    parser.add_argument("--tune", action="store_true", help="also time other tiles and splits")
    parser.add_argument("--device", default="cuda", help="cpu: the gate on Triton's interpreter")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    checked, failures = run_gate(arguments.device, quick=arguments.quick)
    timings: list[Timing] = []
    if not arguments.gate_only:
        broken = {op for op, found in failures.items() if found}
        works = [*attention_works(), *small_works()]
        if arguments.tune:
            works += tuning_works()
        print(f"{'op':14s} {'shape':58s} {'us':>9s} {'spread':>7s} {'rate':>14s} {'share':>6s}")
        for work in works:
            if work.op not in broken:
                timings.append(time_work(work))
                print(row_of(timings[-1]), flush=True)
    found = [asdict(failure) for group in failures.values() for failure in group]
    document = {
        "benchmark": "kernels",
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "versions": versions(),
        "copy_bytes_s": COPY_BYTES_S,
        "matmul_flops": MATMUL_FLOPS,
        "gate": {"checked": checked, "failures": found},
        "timings": [asdict(timing) for timing in timings],
    }
    print(json.dumps(document))
    return 1 if found else 0


def run_gate(device: str, *, quick: bool) -> tuple[int, dict[str, list[Failure]]]:
    """(number of checks, failures by op), each failure printed when found."""
    failures: dict[str, list[Failure]] = {}
    checked = 0
    sources = [check_small_ops(device), check_attention(device, quick)]
    if device == "cuda":
        sources.append(check_replay(device))
    for source in sources:
        for op, failure in source:
            checked += 1
            found = failures.setdefault(op, [])
            if failure is not None:
                found.append(failure)
                print(f"FAILED {failure.label}: {failure.text}", flush=True)
    wrong = sum(map(len, failures.values()))
    print(f"gate: {checked} checks over {', '.join(sorted(failures))}; {wrong} failed", flush=True)
    return checked, failures


def time_work(work: Work) -> Timing:
    """Median time of one launch, from a graph that holds all launches of `work`."""
    us, spread = graph_microseconds(work.launches())
    if work.flops is not None:
        rate = work.flops / (us * 1e-6)
        return Timing(work.op, work.label, us, spread, None, rate / 1e12, rate / MATMUL_FLOPS)
    rate = work.bytes / (us * 1e-6)
    return Timing(work.op, work.label, us, spread, rate / 1e9, None, rate / COPY_BYTES_S)


def graph_microseconds(launches: list[Callable[[], None]]) -> tuple[float, float]:
    """(median, spread) of one launch over repetitions of at least ~20 ms."""
    for launch in launches[:1]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    once = replay_ms(graph, 3) / 3
    replays = max(1, min(1000, int(20.0 / max(once, 1e-3))))
    samples = [replay_ms(graph, replays) / replays for _ in range(7)]
    median = statistics.median(samples)
    return median * 1e3 / len(launches), (max(samples) - min(samples)) / median


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of consecutive replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def row_of(timing: Timing) -> str:
    """One line of the table."""
    if timing.gb_s is not None:
        rate = f"{timing.gb_s:.0f} GB/s"
    else:
        rate = f"{timing.tflop_s:.1f} TFLOP/s"
    return (
        f"{timing.op:14s} {timing.label:58s} {timing.us:9.2f} {timing.spread:7.1%} "
        f"{rate:>14s} {timing.share:6.1%}"
    )


def versions() -> dict[str, str]:
    """Versions that a number depends on."""
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__}
    return {**found, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    sys.exit(main())
