"""What does sampling cost over greedy, by what the rows ask?

    python benchmarks/sampling.py --device cpu --rows 16 --vocab 151936
    python benchmarks/sampling.py --device cuda --rows 64 --vocab 128256 --dtype bfloat16

Checks the tokens of every case against the definition first, then times replays of the cases'
graphs in turns, each behind a greedy replay so that all find caches alike: CPU time of the process
on a CPU.  --head 0 is the worst case: no token is likely.
Prints the median of each, and of its difference and ratio to greedy's replay of the same turn; JSON
last.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.kernels.draw import draw_reference
from paceline.layers.sampling import SamplingTable, process_logits, sample
from paceline.plan.machine import versions
from paceline.runner.recording.recorded import RecordedGraph

HISTORY = 2048  # tokens of the request table
KNOWN = 1500
PROMPT = 500
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
REPLAYS = 20

Case = tuple[SamplingParams, SamplingParams]  # of the first row; of the others


def cases() -> dict[str, Case]:
    """What the rows ask, by name."""
    asked = {
        "temperature": {"temperature": 0.8},
        "low temperature": {"temperature": 0.2},
        "top-p": {"temperature": 0.8, "top_p": 0.95},
        "top-k": {"temperature": 0.8, "top_k": 50},
        "top-k and top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
        "min-p": {"temperature": 0.8, "min_p": 0.05},
        "min tokens": {"temperature": 0.0, "min_tokens": 2000, "stop_token_ids": [1, 2]},
        "min tokens, behind": {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [1, 2]},
        "bias": {"temperature": 0.0, "logit_bias": {5: 3.0, 77: -100.0}},
        "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    }
    found: dict[str, Case] = {"no row": (GREEDY, GREEDY)}
    for name, values in asked.items():
        params = SamplingParams(max_tokens=None, **values)
        found[f"{name}, one row"] = (params, GREEDY)
        found[f"{name}, all rows"] = (params, params)
    return found


def inputs(case: Case, logits: Tensor) -> dict[str, Any]:
    """Arguments of `sample` but for tier and logprobs."""
    rows, device = logits.shape[0], logits.device
    table = SamplingTable(rows + 1, device)
    for row in range(1, rows + 1):
        packed = table.pack(
            case[0] if row == 1 else case[1],
            prompt_len=PROMPT,
            max_len=HISTORY,
            eos_token_ids=(),
            default_seed=row,
        )
        for name, tensor in table.named_tensors().items():
            tensor[row] = torch.from_numpy(getattr(packed, name)).to(device)
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(0, logits.shape[1], (rows + 1, HISTORY), generator=generator)
    return {
        "logits": logits,
        "rows": torch.arange(1, rows + 1, device=device),
        "positions": torch.full((rows,), KNOWN, device=device),
        "table": table,
        "token_ids": history.int().to(device),
    }


def logits_of(rows: int, vocab: int, spread: float, head: float) -> Tensor:
    """[rows, vocab] float32: normal, and a thousand tokens of each row raised by `head` less 1.5
    for each e-fold of their rank, as a model that has an opinion does."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    raised = torch.stack([torch.randperm(vocab, generator=generator)[:1000] for _ in range(rows)])
    more = (head - 1.5 * torch.arange(1.0, 1001.0).log()).clamp(min=0)
    return logits.scatter_add(1, raised, more.expand(rows, -1))


def check(name: str, given: dict[str, Any]) -> None:
    """The tokens are those of the definition."""
    tokens = sample(**given, tier=SamplerTier.BY_ROW, top_logprobs=0).token_ids
    rest = {key: value for key, value in given.items() if key != "logits"}
    processed = process_logits(given["logits"].float(), **rest)
    laws = given["table"].laws.of(given["rows"])
    wanted = draw_reference(processed, laws, given["positions"])
    wrong = (tokens != wanted).nonzero()[:, 0].tolist()
    assert not wrong, f"{name}: rows {wrong} say {tokens[wrong]}, by definition {wanted[wrong]}"


def timer(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Microseconds of one run, each time it is called."""
    if device.type == "cpu":
        recorded = RecordedGraph(poison=False)
        recorded.capture(run)

        def on_cpu() -> float:
            began = time.process_time()
            recorded.replay()
            return (time.process_time() - began) * 1e6

        return on_cpu
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def on_gpu(held: object = run) -> float:
        """held: whose tensors the graph reads."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / REPLAYS

    return on_gpu


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--spread", type=float, default=2.5, help="standard deviation of logits")
    parser.add_argument("--head", type=float, default=16.0, help="how far a few lie above; 0: flat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    logits = logits_of(args.rows, args.vocab, args.spread, args.head)
    logits = logits.to(getattr(torch, args.dtype)).to(device)

    timers = {}
    for name, case in cases().items():
        given = inputs(case, logits)
        check(name, given)
        if not timers:
            plain = dict(given, tier=SamplerTier.GREEDY, top_logprobs=0)
            timers["greedy"] = timer(lambda given=plain: sample(**given), device)
        by_row = dict(given, tier=SamplerTier.BY_ROW, top_logprobs=0)
        timers[name] = timer(lambda given=by_row: sample(**given), device)
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(args.turns):
        for name, run in timers.items():
            timers["greedy"]()
            times[name].append(run())

    greedy = times["greedy"]
    rows = []
    made = f"spread {args.spread:g}, head {args.head:g}"
    print(f"{args.rows} rows x {args.vocab} {args.dtype}, {device}, {made}")
    print(f"{'case':<32}{'us':>10}{'over greedy':>13}{'ratio':>8}{'spread':>9}")
    for name, each in times.items():
        middle, spread = median(each), max(each) - min(each)
        over = median(own - base for own, base in zip(each, greedy, strict=True))
        ratio = median(own / base for own, base in zip(each, greedy, strict=True))
        print(f"{name:<32}{middle:>10.1f}{over:>13.1f}{ratio:>8.3f}{spread:>9.1f}")
        rows.append({"case": name, "us": middle, "ratio": ratio, "spread_us": spread})
    shape = {"rows": args.rows, "vocab": args.vocab, "dtype": args.dtype, "spread": args.spread}
    shape["head"] = args.head
    unit = "CPU time" if device.type == "cpu" else "time"
    print(json.dumps({**shape, "device": str(device), "unit": unit, "cases": rows, **versions()}))


if __name__ == "__main__":
    main()
