"""Host time of a call that pools many texts, by part, against another checkout of the sources.

    python benchmarks/host_pool.py --texts 64 --tokens 512 --against ../old/src

Each side is a process of its own that drives the real admission, engine, scheduler and runner of an
encoder whose steps compute nothing, so that no device works.  Both sides must give the same
vectors, which are made up of what was staged.  They are timed in turns, in CPU time of their
process.  The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import SOURCES, Side

PARTS = ("read", "add", "schedule", "launch", "wait", "process", "rest")
ENCODER = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


class MadeUpProgram:
    """Pools the first tokens of each row, whose requests run on until the host ends them."""

    def __init__(self, parts: Any, num_reqs: int) -> None:
        self._parts = parts
        self._num_reqs = num_reqs

    def run(self) -> None:
        """Writes what the host will read."""
        buffers, width = self._parts.buffers, self._parts.buffers.pooled.shape[1]
        buffers.results_of(self._num_reqs, 1).zero_()
        rows = buffers.row_ids[: self._num_reqs]
        buffers.pooled[: self._num_reqs] = self._parts.table.token_ids[rows, :width]


class World:
    """An open engine whose steps are made up."""

    def __init__(self, num_texts: int, num_tokens: int, step_tokens: int) -> None:
        import torch

        from paceline import LLM

        self.spent: defaultdict[str, int] = defaultdict(int)
        self._shape = (num_texts, num_tokens)
        self._generator = torch.Generator().manual_seed(1)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(ENCODER))
            self.llm = LLM(
                folder,
                threads=1,
                load_format="dummy",
                dtype="float32",
                max_num_batched_tokens=step_tokens,
                max_num_seqs=256,
            )
        engine = self.llm.engine
        runner: Any = engine.runner
        runner._program_of = lambda step, _: MadeUpProgram(runner.parts, step.layout.num_reqs)
        engine._turn = self._turn
        self._wrap(engine, "add", "add")
        kind: Any = type(self.llm.admission)  # which is frozen
        kind._admit = self._timed(kind._admit, "read")

    def run(self) -> int:
        """A call; a checksum of its vectors."""
        import torch

        texts = torch.randint(300, 30000, self._shape, generator=self._generator).tolist()
        began = time.process_time_ns()
        found = self.llm.embed(texts, use_tqdm=False)
        self.spent["call"] += time.process_time_ns() - began
        return zlib.crc32(b"".join(each.vector.tobytes() for each in found))

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.process_time_ns()
            found = function(*args, **named)
            self.spent[part] += time.process_time_ns() - began
            return found

        return timed

    def _turn(self, scheduler: Any, runner: Any, epoch: int, in_flight: Any) -> Any:
        """An overlapped turn, part by part."""
        from paceline.engine.loop import Turn

        step = self._timed(scheduler.schedule, "schedule")(epoch)
        launched = None if step is None else self._timed(runner.launch, "launch")(step)
        if in_flight is None:
            return Turn(launched, [])
        outputs = self._timed(in_flight.wait, "wait")()
        return Turn(launched, self._timed(scheduler.process, "process")(in_flight.step, outputs))


def serve(args: argparse.Namespace) -> None:
    """The child: a line in, a call's cost by part out."""
    world = World(args.texts, args.tokens, args.step_tokens)
    if args.profile:
        import cProfile
        import pstats

        for _ in range(3):
            world.run()
        with cProfile.Profile() as profile:
            for _ in range(10):
                world.run()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
        return
    print(json.dumps({"texts": args.texts}), flush=True)
    for _ in sys.stdin:
        world.spent.clear()
        vectors, spent = world.run(), world.spent
        spent["rest"] = 2 * spent["call"] - sum(spent.values())
        print(json.dumps({"vectors": vectors, "ns": dict(spent)}), flush=True)


def compare(args: argparse.Namespace) -> None:
    """Time both sides in turns and print a table."""
    command = [__file__, "--child", f"--texts={args.texts}", f"--tokens={args.tokens}"]
    command.append(f"--step-tokens={args.step_tokens}")
    sides = {"new": Side(SOURCES, command, OMP_NUM_THREADS="1")}
    if args.against is not None:
        sides["old"] = Side(args.against, command, OMP_NUM_THREADS="1")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 3):  # the first warm
        runs = {name: side.ask("") for name, side in sides.items()}
        assert len({run["vectors"] for run in runs.values()}) == 1, "the sides differ"
        for name, run in runs.items():
            if repeat >= 3:
                found[name].append({part: ns / 1e3 for part, ns in run["ns"].items()})
    for side in sides.values():
        side.close()
    document: dict[str, Any] = {"texts": args.texts, "tokens": args.tokens}
    document["us"] = {
        name: {part: statistics.median(run[part] for run in runs) for part in (*PARTS, "call")}
        for name, runs in found.items()
    }
    print(f"{args.texts} x {args.tokens} tokens, us of CPU a call, median of {args.repeats}")
    print(f"{'':10}" + "".join(f"{name:>10}" for name in document["us"]) + f"{'ratio':>10}")
    for part in (*PARTS, "call"):
        values = [us[part] for us in document["us"].values()]
        ratio = f"{values[0] / values[1]:10.2f}" if len(values) == 2 else ""
        print(f"{part:10}" + "".join(f"{value:10.0f}" for value in values) + ratio)
    print(json.dumps(document))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=41, help="calls of each side")
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
