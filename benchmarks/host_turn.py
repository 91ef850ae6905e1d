"""Host time of a decode turn with many rows, by part, against another checkout of the sources.

    python benchmarks/host_turn.py --rows 256 --against ../old/src

Each side is a process of its own that drives the real engine, scheduler, runner and texts of the
bundled model; graphs are stand-ins that write made-up tokens, so no device works.  Both sides must
say the same texts.  They are timed in turns, in CPU time of their process: on a machine that others
use, wall time is theirs too.  The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sides import SOURCES, Side

PROMPT_TOKENS = 16
PARTS = ("schedule", "launch", "wait", "process", "text")


class Clock:
    """CPU nanoseconds of this process by part."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within the block, time is spent on `name`."""
        began = time.process_time_ns()
        try:
            yield
        finally:
            self.spent[name] += time.process_time_ns() - began


class MadeUpGraph:
    """Writes the tokens of the next step as if they had been sampled."""

    def __init__(self, results: Any, tokens: Iterator[Any]) -> None:
        self._results = results
        self._tokens = tokens

    def capture(self, function: Callable[[], None]) -> None:
        """Nothing is recorded."""

    def replay(self) -> None:
        """Every row emits a token and runs on."""
        self._results.copy_(next(self._tokens))


class MadeUpGraphs:
    """A factory of such graphs."""

    needs_warm_up = False
    shares_memory = True

    def __init__(self, make: Callable[..., MadeUpGraph]) -> None:
        self.make = make

    def bytes_held(self) -> int:
        """None of its own."""
        return 0


class World:
    """An engine in the middle of decoding `rows` requests."""

    def __init__(self, rows: int, *, num_turns: int, stop: tuple[str, ...]) -> None:
        import torch

        from paceline import LLM, SamplingParams
        from paceline.runner.recording.graphs import CapturePolicy, GraphStore

        self.clock = Clock()
        self.llm = LLM(
            "bundled",
            threads=1,
            max_num_seqs=rows,
            cuda_graph_max_bs=rows,
            speculative_algorithm="off",
            max_model_len=PROMPT_TOKENS + num_turns + 8,
        )
        generator = torch.Generator().manual_seed(1)
        vocab = self.llm.prepared.config.vocab_size
        ids = torch.randint(300, vocab, (num_turns + 8, rows), generator=generator)
        steps = torch.zeros(*ids.shape, 3, dtype=torch.int32)
        steps[:, :, 0], steps[:, :, 2] = 1, ids
        prompts = torch.randint(300, vocab, (rows, PROMPT_TOKENS), generator=generator).tolist()
        params = SamplingParams(
            temperature=0.0, max_tokens=num_turns + 4, ignore_eos=True, seed=0, stop=stop
        )
        engine = self.llm.engine
        runner: Any = engine._runner
        self.trackers = self.llm.submit(prompts, params)
        while any(tracker.num_tokens == 0 for tracker in self.trackers):
            engine.step()  # prompts are computed: their steps are no graphs on a CPU
        results, tokens = runner.parts.buffers.results_of(rows, 1), iter(steps)
        runner._graphs = GraphStore(
            MadeUpGraphs(lambda **_: MadeUpGraph(results, tokens)),
            reserve_factor=None,
            notify=print,
            policy=CapturePolicy(at_boot=False, on_use=1),
        )
        engine.step()  # the last that the model itself computed lands
        engine._turn = self._turn

    def run(self, num_turns: int) -> None:
        """Turns of the loop."""
        for _ in range(num_turns):
            with self.clock.part("turn"):
                self.llm.engine.step()

    def texts(self) -> int:
        """A checksum of every text so far."""
        found = [tracker.snapshot().outputs[0].text for tracker in self.trackers]
        return zlib.crc32("\0".join(found).encode())

    def _turn(self, scheduler: Any, runner: Any, epoch: int, in_flight: Any) -> Any:
        """An overlapped turn, part by part."""
        from paceline.engine.loop import Turn

        with self.clock.part("schedule"):
            step = scheduler.schedule(epoch)
        with self.clock.part("launch"):
            launched = runner.launch(step)
        with self.clock.part("wait"):
            outputs = in_flight.wait()
        with self.clock.part("process"):
            updates = scheduler.process(in_flight.step, outputs)
        return Turn(launched, updates)


def serve(args: argparse.Namespace) -> None:
    """The child: reads a number of turns a line, answers what they cost and what was said."""
    world = World(args.rows, num_turns=args.turns * (args.repeats + 1), stop=tuple(args.stop))
    if args.profile:
        import cProfile
        import pstats

        world.run(args.turns)
        with cProfile.Profile() as profile:
            world.run(args.turns)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
        return
    print(json.dumps({"rows": args.rows}), flush=True)
    for line in sys.stdin:
        world.clock.spent.clear()
        world.run(int(line))
        spent = world.clock.spent
        spent["text"] = 2 * spent["turn"] - sum(spent.values())
        print(json.dumps({"texts": world.texts(), "ns": dict(spent)}), flush=True)


def compare(args: argparse.Namespace) -> None:
    """Time both sides in turns and print a table."""
    command = [__file__, "--child", f"--rows={args.rows}"]
    command += [f"--turns={args.turns}", f"--repeats={args.repeats}"]
    command += [f"--stop={string}" for string in args.stop]
    sides = {"new": Side(SOURCES, command, OMP_NUM_THREADS="1")}
    if args.against is not None:
        sides["old"] = Side(args.against, command, OMP_NUM_THREADS="1")
    for side in sides.values():
        side.ask(str(args.turns))  # warm
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        runs = {name: side.ask(str(args.turns)) for name, side in sides.items()}
        assert len({run["texts"] for run in runs.values()}) == 1, "the sides say different texts"
        for name, run in runs.items():
            scale = 1e3 * args.turns
            found[name].append({part: ns / scale for part, ns in run["ns"].items()})
    for side in sides.values():
        side.close()
    document: dict[str, Any] = {"rows": args.rows, "turns": args.turns, "repeats": args.repeats}
    document["us"] = {
        name: {part: statistics.median(run[part] for run in runs) for part in (*PARTS, "turn")}
        for name, runs in found.items()
    }
    print(f"{args.rows} rows, us of CPU a turn, median of {args.repeats} x {args.turns} turns")
    print(f"{'':10}" + "".join(f"{name:>10}" for name in document["us"]) + f"{'ratio':>10}")
    for part in (*PARTS, "turn"):
        values = [us[part] for us in document["us"].values()]
        ratio = f"{values[0] / values[1]:10.2f}" if len(values) == 2 else ""
        print(f"{part:10}" + "".join(f"{value:10.0f}" for value in values) + ratio)
    if "old" in found:
        pairs = zip(found["new"], found["old"], strict=True)
        document["ratio"] = statistics.median(new["turn"] / old["turn"] for new, old in pairs)
    print(json.dumps(document))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--stop", action="append", default=[], help="a stop string of every request"
    )
    parser.add_argument("--against", type=Path, help="the src folder of another checkout")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="profile this checkout instead")
    args = parser.parse_args()
    if args.child or args.profile:
        serve(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
