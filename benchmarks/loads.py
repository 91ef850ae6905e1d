"""Every load of docs/throughput.md on one engine, one behind the other: a quick look at all rows.

    python benchmarks/loads.py --model llama-3.1-8b --load-format dummy --attention-backend triton

The records are `paceline bench throughput`'s, a process for each load; this boots once, sends each
load once to warm, then --repeats times with new tokens, and prints a row for each.  The last line
is JSON.
"""

import argparse
import json
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from paceline.bench.throughput_report import Summary, time_by_kind
from paceline.bench.traffic.one_pass import run_pass
from paceline.bench.traffic.plan import plan_traffic
from paceline.bench.traffic.shape import Lengths, TrafficShape
from paceline.bench.turn_log import TurnLog
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.llm.prepare import prepare
from paceline.plan.machine import seconds_since_process_start, settled, versions


def load(requests: int, inputs: int, outputs: int, **more: Any) -> TrafficShape:
    """`requests` at once of one length."""
    lengths = {"input_len": Lengths.parse(f"{inputs}"), "output_len": Lengths.parse(f"{outputs}")}
    return TrafficShape(num_requests=requests, **lengths, **more)


LOADS = {
    "ttft1": load(1, 1024, 1),
    "ttft8": load(8, 1024, 1),
    "ttft64": load(64, 1024, 1),
    "decode1": load(1, 1024, 257),
    "decode8": load(8, 1024, 257),
    "decode64": load(64, 1024, 257),
    "sampled64": load(64, 1024, 257, temperature=0.8, top_p=0.95),
    "decode256": load(256, 128, 257),
    "prefix": load(256, 64, 32, shared_prefix_len=2048),
    "mix": TrafficShape(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=20_480)
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of each load")
    parser.add_argument("--mix-repeats", type=int, default=1, help="those of the mix, the longest")
    parser.add_argument("--only", default=",".join(LOADS), help="comma-separated loads")
    args = vars(parser.parse_args())
    repeats, mix_repeats = args.pop("repeats"), args.pop("mix_repeats")
    names = args.pop("only").split(",")
    prepared, log = prepare(args), TurnLog()
    llm = LLM(prepared, knobs=Knobs(around_turn=log.around))
    document: dict[str, Any] = {"benchmark": "loads", "device": prepared.device.name}
    document |= {"versions": versions(), "asked": args, "ready_s": seconds_since_process_start()}
    print(f"{document['device']}, ready after {document['ready_s']:.1f} s", flush=True)
    document["loads"] = {}
    with settled():
        for seed, name in enumerate(names):
            shape = replace(LOADS[name], repeats=mix_repeats if name == "mix" else repeats)
            traffic = replace(plan_traffic(shape, prepared), seed=seed)
            first, *steady = (
                run_pass(llm, log, traffic.arrivals(number), name=f"{name} {number}")
                for number in range(shape.repeats + 1)
            )
            row = row_of([Summary.of(done) for done in steady], first.seconds)
            row["kinds"] = [kind.to_json() for kind in time_by_kind(steady[-1])]
            document["loads"][name] = row
            print(f"{name:<10}" + line(row), flush=True)
            for kind in time_by_kind(steady[-1]):
                print(
                    f"    {kind.name:<16}{kind.steps:>6} steps {kind.rows:>7} rows "
                    f"{kind.padded_tokens:>8} padded tokens {kind.seconds:8.3f} s, "
                    f"wait {kind.wait_s:.3f}",
                    flush=True,
                )
    llm.close()
    print(json.dumps(document))


def row_of(passes: list[Summary], first_s: float) -> dict[str, Any]:
    """Medians over passes; `first_s`: seconds of the load's first."""
    ttft = [asdict(done.ttft_ms)["max"] for done in passes if done.ttft_ms is not None]
    decode = [done.decode_tok_s for done in passes if done.decode_tok_s is not None]
    output = [done.output_tok_s for done in passes]
    return {
        "first_s": first_s,
        "seconds": median(done.seconds for done in passes),
        "output_tok_s": median(output),
        "spread": (max(output) - min(output)) / median(output),
        "decode_tok_s": median(decode) if decode else None,
        "ttft_max_ms": median(ttft),
    }


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    decode = "-" if row["decode_tok_s"] is None else f"{row['decode_tok_s']:.1f}"
    return (
        f"output {row['output_tok_s']:>8.1f} tok/s (spread {row['spread']:.3f})  decode {decode:>8}"
        f"  first token of all {row['ttft_max_ms']:>8.2f} ms  pass {row['seconds']:.3f} s, "
        f"first {row['first_s']:.3f} s"
    )


if __name__ == "__main__":
    main()
