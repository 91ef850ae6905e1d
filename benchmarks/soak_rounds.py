"""Rounds of speculation under random traffic: no leak, no NaN, no hang, and plain decoding's text.

    python benchmarks/soak_rounds.py --rounds 20000 [--device cuda] [--attention-backend fa4]
    python benchmarks/soak_rounds.py --rounds 5000 --device cuda --tp 2 --model llama-3.2-1b

Requests of the bundled model arrive at random, with random prompts, lengths and sampling, some
with speculation off; some are aborted half-way.  One engine after another drafts, each with its
share of the rounds: chains and trees of the bundled head, a draft model, prompt lookup.  The pool
is small, so that requests are preempted.  Ended requests are compared with plain decoding; those
that part are counted and shown.  At the end every page must be back.  Exits 1 when a check fails;
the last line is JSON.

Another model is a shape with dummy weights, and drafts by lookup and by itself.  With --tp several
processes share it, and their tokens are compared every COMPARE_RANKS_EVERY steps; plain decoding
stays one process.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Step
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.tracker import Tracker
from paceline.engine.loop import Launched
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.plan.machine import local_device, versions

SEED = 11
BUNDLED = "bundled"
MAX_REQUESTS = 24  # at a time, running and waiting
POOL_PAGES = 90  # of 16 tokens: fewer than 16 such requests take
DRAFTERS: tuple[dict[str, Any], ...] = (
    {"speculative_algorithm": "EAGLE3"},
    {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 2},
    {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4},
    {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 8, "speculative_num_steps": 4},
    {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "bundled"},
    {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 2},
)
OF_ANY_MODEL: tuple[dict[str, Any], ...] = (
    {"speculative_algorithm": "NGRAM"},
    {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 4},
)
COMPARE_RANKS_EVERY = 16
TURNS_PER_ROUND = 20  # and LEAST_TURNS: more mean that nothing goes on
LEAST_TURNS = 10_000
Request = tuple[list[int], SamplingParams]
Ended = list[tuple[Request, RequestOutput]]


@dataclass(slots=True)
class Tally:
    """What one engine did."""

    drafter: dict[str, Any]
    rounds: int = 0  # of the engine
    request_rounds: int = 0
    tokens: int = 0
    ended: int = 0
    aborted: int = 0
    preempted: int = 0
    compared: int = 0
    differing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main() -> int:
    args = parse_arguments()
    common = common_options(args)
    runs = [soak(args, common, drafter) for drafter in drafters_of(args.model)]
    tallies = [tally for tally, _ in runs]
    with LLM(**common, speculative_algorithm="off", max_model_len=1024) as plain:
        for tally, ended in runs:
            compare(plain, ended[: args.compare], tally)
    document = {
        "benchmark": "soak-rounds",
        "device": local_device(args.device).name,
        "versions": versions(),
        "attention_backend": args.attention_backend,
        "dtype": args.dtype,
        "model": args.model,
        "tensor_parallel_size": args.tp,
        "rounds": sum(tally.rounds for tally in tallies),
        "engines": [asdict(tally) for tally in tallies],
    }
    for tally in tallies:
        print(f"{tally.drafter}: {tally.compared} compared, {len(tally.differing)} parted")
    failed = [text for tally in tallies for text in tally.failed]
    for text in failed:
        print(f"FAILED {text}")
    print(json.dumps(document))
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="of all engines together")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--compare", type=int, default=60, help="ended requests, per engine")
    parser.add_argument("--model", default=BUNDLED, help="or the shape of another")
    parser.add_argument("--tp", type=int, default=1, help="processes that share the model")
    return parser.parse_args()


def common_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of the engines that draft and of the plain one."""
    return {
        "model": args.model,
        "load_format": "auto" if args.model == BUNDLED else "dummy",
        "device": args.device,
        "dtype": args.dtype,
        "attention_backend": args.attention_backend,
        "max_num_seqs": 16,
        "threads": 1,
    }


def drafters_of(model: str) -> list[dict[str, Any]]:
    """The options of each engine."""
    if model == BUNDLED:
        return list(DRAFTERS)
    own = {"speculative_draft_model_path": model}
    return [
        drafter | (own if drafter["speculative_algorithm"] == "STANDALONE" else {})
        for drafter in OF_ANY_MODEL
    ]


def soak(
    args: argparse.Namespace, common: dict[str, Any], drafter: dict[str, Any]
) -> tuple[Tally, Ended]:
    """Run one engine for its share of the rounds; returns with its tally what ended."""
    tally, began = Tally(drafter), time.monotonic()
    source = random.Random(f"{SEED} {sorted(drafter.items())}")
    shared: dict[str, Any] = {}
    if args.tp > 1:
        shared |= {"tensor_parallel_size": args.tp, "compare_ranks_every": COMPARE_RANKS_EVERY}
    share = args.rounds // len(drafters_of(args.model))
    groups = 1 if drafter["speculative_algorithm"] == "NGRAM" else 2
    with LLM(
        **common,
        **shared,
        **drafter,
        chunked_prefill_size=96,
        max_num_batched_tokens=256,
        max_model_len=1024,
        knobs=Knobs(num_pages=(POOL_PAGES,) * groups),
    ) as llm:
        count_rounds(llm, tally)
        ended = run_traffic(llm, share, source, tally)
        llm.engine.scheduler.check_integrity()
        if llm.engine.has_work:
            tally.failed.append(f"{drafter}: work is left after everything ended")
    tally.seconds = time.monotonic() - began
    print(
        f"{drafter}: {tally.rounds} rounds, {tally.ended} ended, {tally.aborted} aborted, "
        f"{tally.preempted} preempted, {tally.seconds:.0f} s",
        flush=True,
    )
    return tally, ended


def count_rounds(llm: LLM, tally: Tally) -> None:
    """Count the rounds that the engine launches from now on."""
    runner = llm.engine._runner
    launch = runner.launch

    def counted(step: Step) -> Launched:
        tally.rounds += step.is_round
        return launch(step)

    runner.launch = counted  # type: ignore[method-assign]


def run_traffic(llm: LLM, rounds: int, source: random.Random, tally: Tally) -> Ended:
    """Arrivals and aborts until `rounds` rounds have run; then everything ends."""
    requests = random_requests(llm, source)
    live: dict[Tracker, Request] = {}
    ended: Ended = []
    turns = 0
    while live or tally.rounds < rounds:
        turns += 1
        if turns > LEAST_TURNS + TURNS_PER_ROUND * rounds:
            tally.failed.append(
                f"{tally.drafter}: {tally.rounds} of {rounds} rounds and {len(live)} requests left "
                f"after {turns} turns: it hangs, or does not draft"
            )
            return ended
        if tally.rounds < rounds and len(live) < MAX_REQUESTS and source.random() < 0.4:
            request = next(requests)
            (tracker,) = llm.submit([request[0]], request[1])
            live[tracker] = request
        if live and source.random() < 0.01:
            tracker = source.choice(list(live))
            llm.abort(tracker.request.request_id)
            note(tracker, tally)
            tally.aborted += 1
            del live[tracker]
        if not llm.engine.has_work:
            continue
        for tracker in llm.engine.step():
            if tracker.is_finished and tracker in live:
                note(tracker, tally)
                tally.ended += 1
                ended.append((live.pop(tracker), tracker.snapshot()))
    while llm.engine.has_work:
        llm.engine.step()
    return ended


def note(tracker: Tracker, tally: Tally) -> None:
    """Count an ended request."""
    output = tracker.snapshot()
    assert output.metrics is not None, "an ended request has metrics"
    tally.request_rounds += output.metrics.rounds
    tally.tokens += output.metrics.output_tokens
    tally.preempted += output.metrics.preemptions
    if output.outputs[0].error is not None:
        tally.failed.append(f"{tally.drafter}: {output.outputs[0].error}")


def random_requests(llm: LLM, source: random.Random) -> Iterator[Request]:
    """Prompts that often share a beginning or repeat themselves; all kinds of sampling."""
    vocab = llm.prepared.config.vocab_size
    code: list[int] = []
    if llm.prepared.admission.tokenizer is not None:  # a shape has none
        code = llm.tokenizer.encode("def total(items):\n    result = 0\n    for item in items:\n")
    shared = [source.randrange(1, vocab) for _ in range(200)]
    while True:
        tail = [source.randrange(1, vocab) for _ in range(source.randint(1, 40))]
        prompt = source.choice(([], code, shared[: source.randint(1, 200)], tail * 3)) + tail
        yield (
            list(prompt),
            SamplingParams(
                temperature=source.choice((0.0, 0.0, 0.7, 1.0)),
                top_p=source.choice((1.0, 0.9)),
                frequency_penalty=source.choice((0.0, 0.0, 0.5)),
                seed=source.randrange(1 << 30),
                max_tokens=source.randint(1, 160),
                ignore_eos=source.random() < 0.7,
                speculative=source.random() < 0.9,
            ),
        )


def compare(plain: LLM, ended: Ended, tally: Tally) -> None:
    """Against plain decoding; a text may part at a tie, which the prover judges."""
    if not ended:
        tally.failed.append(f"{tally.drafter}: no request ended, so none was compared")
        return
    answers = plain.generate(
        [prompt for (prompt, _), _ in ended], [params for (_, params), _ in ended]
    )
    for ((_, params), output), answer in zip(ended, answers, strict=True):
        got, wanted = output.outputs[0].token_ids, answer.outputs[0].token_ids
        tally.compared += 1
        if got == wanted:
            continue
        at = next(
            (i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]),
            min(len(got), len(wanted)),
        )
        tally.differing.append(f"token {at} of {len(wanted)}, temperature {params.temperature}")
    if len(tally.differing) > max(1, tally.compared // 20):
        tally.failed.append(
            f"{tally.drafter}: {len(tally.differing)} of {tally.compared} texts differ"
        )


if __name__ == "__main__":
    sys.exit(main())
