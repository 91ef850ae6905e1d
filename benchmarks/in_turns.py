"""One checkout against another: the same requests in turns in one run, pair by pair.

    python benchmarks/in_turns.py --against ../old/src --options '{"threads": 1}'
    python benchmarks/in_turns.py --against ../old/src --case 64x1024x129 --case 1x1024x129 \
        --options '{"model": "llama-3.1-8b", "load_format": "dummy", "mem_fraction_static": 0.4,
                    "enable_prefix_cache": false}'

Each side is a process of its own with one engine; both live at once and take turns, and who begins
takes turns too.  A case is REQUESTSxINPUTxOUTPUT tokens, greedy, end tokens ignored.  Both sides
must say the same tokens every time: a time brings the prompts of the time before, so on a GPU leave
out the prefix cache, behind which few rows are computed, by other kernels.  Tells the median of
old / new over the pairs (above 1: the new one is faster) with a 95 % interval; JSON last.
"""

import argparse
import json
import random
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sides import SOURCES, Side, median_interval

LEAST_PAIRS = 7


def serve(options: dict[str, Any]) -> None:
    """The child: reads cases, answers how long each took and what was said."""
    from paceline import LLM, SamplingParams
    from paceline.plan.machine import versions

    llm = LLM(**options)
    prepared = llm.prepared
    facts = {"device": prepared.device.name, "versions": versions()}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        requests, input_len, output_len = map(int, line.split("x"))
        source = random.Random(line)
        prompts = [
            [source.randrange(prepared.config.vocab_size) for _ in range(input_len)]
            for _ in range(requests)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
        said = [output.outputs[0].token_ids for output in outputs]
        assert all(len(ids) == output_len for ids in said)
        print(json.dumps({**took, "said": zlib.crc32(repr(said).encode())}), flush=True)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Time the cases on both sides in turns; the document."""
    command = [__file__, "--child", "--options", args.options]
    sides = {"old": Side(args.against, command), "new": Side(SOURCES, command)}
    rows = []
    for case in args.case or ["1x128x65", "8x128x65"]:
        said: dict[str, list[int]] = {}
        for name, side in sides.items():
            said[name] = [side.ask(case)["said"] for _ in range(2)]  # and warm
        ratios: dict[str, list[float]] = {"s": [], "cpu_s": []}
        for pair in range(args.pairs):
            order = sorted(sides, reverse=pair % 2 == 0)
            runs = {name: sides[name].ask(case) for name in order}
            for name, run in runs.items():
                said[name].append(run["said"])
            for clock, found in ratios.items():
                found.append(runs["old"][clock] / runs["new"][clock])
        if fault := disagreement(said):
            sys.exit(f"case {case}: {fault}")
        rows.append({"case": case, "pairs": args.pairs})
        for clock, found in ratios.items():
            middle, low, high = median_interval(found)
            rows[-1] |= {
                f"old_over_new_{clock}": middle,
                f"{clock}_low": low,
                f"{clock}_high": high,
            }
    document = {**sides["new"].ready, "options": json.loads(args.options), "rows": rows}
    for side in sides.values():
        side.close()
    return document


def disagreement(said: Mapping[str, Sequence[int]]) -> str | None:
    """What of it is not the same, if something is; said: of each side, what it said each time."""
    for name, each in said.items():
        others = [index for index, one in enumerate(each) if one != each[0]]
        if others:
            return (
                f"side {name} says other tokens at time {others[0] + 1} than at first, alone: pass "
                '"enable_prefix_cache": false, so that each time computes the same rows'
            )
    if len({each[0] for each in said.values()}) > 1:
        return f"sides {' and '.join(said)} say different tokens, each of them the same every time"
    return None


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the src folder of the old checkout")
    parser.add_argument("--case", action="append", help="REQUESTSxINPUTxOUTPUT; may be repeated")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS)
    parser.add_argument("--options", default="{}", help="the engine's options as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(json.loads(args.options))
        return
    if args.against is None or args.pairs < LEAST_PAIRS:
        parser.error(f"--against is needed, and --pairs of at least {LEAST_PAIRS}")
    document = compare(args)
    print(f"{'case':>16}{'old/new':>10}{'95 % interval':>20}{'by CPU time':>14}")
    for row in document["rows"]:
        span = f"{row['s_low']:.3f} to {row['s_high']:.3f}"
        print(
            f"{row['case']:>16}{row['old_over_new_s']:10.3f}{span:>20}"
            f"{row['old_over_new_cpu_s']:14.3f}"
        )
    print(json.dumps(document))


if __name__ == "__main__":
    main()
