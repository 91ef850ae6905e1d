"""What speculation gains: acceptance by position, tokens per round, and the speed-up.

    python -m paceline.engine.bench_speculative --model bundled --speculative-algorithm NGRAM

Two engines of the same model stand side by side; prompts come one at a time, in turns, greedy, end
tokens ignored.  A rate is that of the tokens behind the first.  The speed-up is the geometric mean
over the prompts of the two rates' quotient, with a bootstrap interval over the prompts.  It is told
only of texts that are equal up to ties.  Forced acceptance compares hardware: its texts are wrong,
nobody compares them, and every line says so.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

from paceline.core.errors import ConfigError, IntegrityError, PacelineError, message
from paceline.core.options import engine_options
from paceline.core.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance
from paceline.engine.arguments import add_engine_arguments, add_flag, asked_arguments
from paceline.engine.drafting import with_drafter
from paceline.engine.inputs import Prompt
from paceline.engine.llm import LLM
from paceline.engine.machine import local_device
from paceline.engine.outputs import RequestOutput
from paceline.engine.prompt_set import BUILT_IN, NamedPrompt, inputs_of, read_prompts
from paceline.engine.speculation import without_speculation
from paceline.engine.teacher import Form
from paceline.engine.verdicts import Verdict, part

USUAL_SHARE = 0.9  # of a GPU's memory, for both engines together
CONFIDENCE = 0.95
RESAMPLES = 2000
SUMMARY = "Acceptance by position, tokens per round, and the speed-up over plain decoding."


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeShape:
    """What is timed.  Raises ConfigError for counts below their least."""

    prompts: tuple[NamedPrompt, ...]
    output_len: int = 64  # tokens
    repeats: int = 3  # of each prompt, timed

    def __post_init__(self) -> None:
        for name, value, least in (
            ("output_len", self.output_len, 2),
            ("repeats", self.repeats, 1),
            ("prompts", len(self.prompts), 2),
        ):
            if value < least:
                remedy = "an interval needs two prompts" if name == "prompts" else "raise it"
                raise ConfigError(
                    message(name, expected=f"at least {least}", got=value, remedy=remedy)
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One prompt on one engine: the median run of its decode."""

    output: RequestOutput
    decode_s: float  # from the first token to the last

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.output.outputs[0].token_ids

    @property
    def rate(self) -> float:
        """Tokens behind the first, per second."""
        return (len(self.tokens) - 1) / max(self.decode_s, 1e-9)


def bench_speculative(
    asked: Mapping[str, object],
    shape: SpeculativeShape,
    *,
    make_llm: Callable[..., LLM] | None = None,
) -> dict[str, object]:
    """Run the benchmark; returns its document.

    Raises ConfigError when nobody may draft, IntegrityError for texts that differ beyond ties.
    """
    make_llm = LLM if make_llm is None else make_llm
    drafting = with_drafter(asked)
    if drafting is None:
        raise ConfigError(
            message(
                "speculative_algorithm",
                expected="a drafter",
                got="off",
                remedy="name one, or leave the flag out",
            )
        )
    shared = _shared(asked)
    plain = make_llm(**without_speculation(asked), **shared)
    try:
        speculative = make_llm(**drafting | shared)
        try:
            return _compare(plain, speculative, shape)
        finally:
            speculative.close()
    finally:
        plain.close()


def _shared(asked: Mapping[str, object]) -> dict[str, object]:
    """Half of a GPU's memory for each engine; one request at a time unless more was asked."""
    options = engine_options(asked)
    shared: dict[str, object] = {}
    if options.gpu_memory_utilization is None and local_device(options.device).device_type != "cpu":
        shared["gpu_memory_utilization"] = USUAL_SHARE / 2
    if options.max_num_seqs is None:
        shared["max_num_seqs"] = 1
    return shared


def _compare(plain: LLM, speculative: LLM, shape: SpeculativeShape) -> dict[str, object]:
    report = speculative.report()
    speculation = report["speculation"]
    forced = speculation["forced_tokens_per_round"]
    params = SamplingParams(
        temperature=0.0, max_tokens=shape.output_len, ignore_eos=True, seed=0
    )
    inputs = inputs_of(plain, shape.prompts)
    for llm in (plain, speculative):
        for _ in range(2):  # a graph is captured when its shape comes for the second time
            llm.generate([inputs[0]], params)
    pairs = [_in_turns(plain, speculative, each, params, shape.repeats) for each in inputs]
    verdicts = None
    if forced is None:
        verdicts = _verdicts(plain, pairs, shape.prompts, params)
    totals = Acceptance.of(_metrics(pair[1]) for pair in pairs)
    return {
        "device": {"name": report["device"], "type": report["options"]["device"]["value"]},
        "versions": report["versions"],
        "model": report["options"]["model"]["value"],
        "dtype": report["options"]["dtype"]["value"],
        "attention": report["attention"],
        "speculation": speculation,
        "forced": forced,
        "texts": verdicts,
        "output_len": shape.output_len,
        "acceptance": totals.to_json(),
        "plain_tok_s": _total_rate([one for one, _ in pairs]),
        "speculative_tok_s": _total_rate([other for _, other in pairs]),
        "speed_up": speed_up([other.rate / one.rate for one, other in pairs]),
        "prompts": [
            {
                "prompt": prompt.name,
                "kind": prompt.kind,
                "plain_tok_s": one.rate,
                "speculative_tok_s": other.rate,
                "speed_up": other.rate / one.rate,
                "acceptance": Acceptance.of([_metrics(other)]).to_json(),
            }
            for prompt, (one, other) in zip(shape.prompts, pairs, strict=True)
        ],
    }


def _in_turns(
    plain: LLM, speculative: LLM, prompt: Prompt, params: SamplingParams, repeats: int
) -> tuple[Timed, Timed]:
    """One prompt on both engines, one after the other, several times."""
    runs: tuple[list[RequestOutput], list[RequestOutput]] = ([], [])
    for _ in range(repeats):
        for llm, found in zip((plain, speculative), runs, strict=True):
            found += llm.generate([prompt], params)
    one, other = (_timed(found) for found in runs)
    return one, other


def _timed(outputs: Sequence[RequestOutput]) -> Timed:
    texts = {output.outputs[0].token_ids for output in outputs}
    if len(texts) > 1:
        raise IntegrityError(
            message(
                "greedy runs of one prompt",
                expected="equal",
                got=f"{len(texts)} different texts",
                remedy="do not trust a timing of this configuration; try --enforce-eager",
            )
        )
    seconds = []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None, "a finished request has metrics"
        assert metrics.latency_s is not None, "it has tokens"
        assert metrics.ttft_s is not None, "it has tokens"
        seconds.append(metrics.latency_s - metrics.ttft_s)
    return Timed(output=outputs[-1], decode_s=median(seconds))


def _verdicts(
    plain: LLM,
    pairs: Sequence[tuple[Timed, Timed]],
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
) -> dict[str, int]:
    """How many texts are equal and how many tie.  Raises IntegrityError for a bug."""
    teacher = plain.teacher()
    dtype: torch.dtype = getattr(torch, str(plain.report()["options"]["dtype"]["value"]))
    counts = {verdict.value: 0 for verdict in (Verdict.EQUAL, Verdict.TIE)}
    for prompt, (one, other) in zip(prompts, pairs, strict=True):
        known = one.output.prompt_token_ids

        def logits_behind(generated: Sequence[int], known: tuple[int, ...] = known) -> torch.Tensor:
            tokens = (*known, *generated)
            return teacher.read(tokens, Form.plain(len(tokens))).logits

        parting = part(
            one.tokens,
            other.tokens,
            logits_behind,
            params=params,
            num_known=len(known),
            dtype=dtype,
        )
        verdict = Verdict.EQUAL if parting is None else parting.verdict(dtype)
        if verdict is Verdict.BUG:
            assert parting is not None
            raise IntegrityError(
                message(
                    f"text of '{prompt.name}' with speculation",
                    expected="that of plain decoding, up to ties",
                    got=f"token {parting.got} for {parting.wanted} at output {parting.index}, "
                    f"{parting.gap_ulps} ulps apart",
                    remedy="there is no speed-up to tell of; run `paceline prove`",
                )
            )
        counts[verdict.value] += 1
    return counts


def speed_up(ratios: Sequence[float]) -> dict[str, float]:
    """The geometric mean of ratios, and what 95 of 100 resamples of them span; fixed seed."""
    source = random.Random(0)
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted(
        sum(source.choices(logs, k=len(logs))) / len(logs) for _ in range(RESAMPLES)
    )
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return {
        "mean": geometric_mean(ratios),
        "low": math.exp(means[tail]),
        "high": math.exp(means[-1 - tail]),
        "confidence": CONFIDENCE,
    }


def table(document: Mapping[str, Any]) -> str:
    """The document for people."""
    shares = " ".join(f"{x:.0%}" for x in document["acceptance"]["accepted_by_position"])
    gain, texts = document["speed_up"], document["texts"]
    speculation = document["speculation"]
    rows = [
        f"{document['model']} on {document['device']['name']}, attention "
        f"{document['attention']['name']}",
        f"{speculation['algorithm']}, {speculation['num_steps']} steps, topk "
        f"{speculation['topk']}, {speculation['num_draft_tokens']} tokens verified",
        f"{'prompt':<16}{'plain tok/s':>13}{'speculative':>13}{'speed-up':>10}{'per round':>11}",
    ]
    rows += [
        f"{row['prompt']:<16}{row['plain_tok_s']:>13.1f}{row['speculative_tok_s']:>13.1f}"
        f"{row['speed_up']:>10.2f}{_number(row['acceptance']['mean_tokens_per_round']):>11}"
        for row in document["prompts"]
    ]
    rows += [
        f"mean_tokens_per_round {_number(document['acceptance']['mean_tokens_per_round'])} (bonus "
        f"tokens included, a request's first token not), accepted by position {shares}",
        f"plain {document['plain_tok_s']:.1f} tok/s, speculative "
        f"{document['speculative_tok_s']:.1f} tok/s",
        f"speed-up {gain['mean']:.2f}, {gain['confidence']:.0%} interval {gain['low']:.2f} to "
        f"{gain['high']:.2f}",
    ]
    if texts is not None:
        rows.append(f"texts: {texts['equal']} equal, {texts['tie']} tie")
        return "\n".join(rows)
    word = f"FORCED to {document['forced']:g} tokens per round: "
    return "\n".join(word + row for row in [*rows, "texts are wrong and were not compared"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line without click; prints a table and then the JSON document as last line."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.engine.bench_speculative",
        description=SUMMARY,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add_flag(parser, "--prompts", type=Path, default=BUILT_IN, help="TOML file of prompts.")
    add_flag(parser, "--output-len", type=int, default=64, help="Output length.  [tokens]")
    add_flag(parser, "--repeats", type=int, default=3, help="Timed runs of each prompt.")
    parser.add_argument("--json", action="store_true", help="Print the JSON line only.")
    add_engine_arguments(parser)
    values = vars(parser.parse_args(argv))
    try:
        shape = SpeculativeShape(
            prompts=read_prompts(values["prompts"]),
            output_len=values["output_len"],
            repeats=values["repeats"],
        )
        document = bench_speculative(asked_arguments(values), shape)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if not values["json"]:
        print(table(document))
    print(json.dumps(document))
    return 0


def _metrics(timed: Timed) -> Any:
    return timed.output.metrics


def _total_rate(timed: Sequence[Timed]) -> float:
    tokens = sum(len(each.tokens) - 1 for each in timed)
    return tokens / max(sum(each.decode_s for each in timed), 1e-9)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
