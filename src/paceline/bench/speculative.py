"""What speculation gains: acceptance by position, tokens per round, and the speed-up.

    python -m paceline bench speculative --model bundled --speculative-algorithm NGRAM

Two engines of the same model stand side by side; prompts come one at a time, in turns, greedy, end
tokens ignored.  A rate is that of the tokens behind the first.  The speed-up is the geometric mean
over the prompts of the two rates' quotient, with a bootstrap interval over the prompts.  It is told
only of texts that are equal up to ties.  Forced acceptance compares hardware: its texts are wrong,
nobody compares them, and every line says so.
"""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.bench.paired_runs import count_verdicts, in_turns, speed_up, total_rate
from paceline.bench.speculative_shape import SpeculativeShape
from paceline.core.errors import ConfigError, message
from paceline.core.options import engine_options
from paceline.core.progress import collect, cut_mark
from paceline.core.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance, drafter_words
from paceline.llm.llm import LLM
from paceline.plan.machine import local_device
from paceline.plan.speculation import without_speculation
from paceline.proof.lossless.drafting import with_drafter
from paceline.proof.lossless.prompt_set import inputs_of

USUAL_SHARE = 0.9  # of a GPU's memory, for both engines together


def bench_speculative(
    asked: Mapping[str, object],
    shape: SpeculativeShape,
    *,
    make_llm: Callable[..., LLM] | None = None,
) -> dict[str, object]:
    """Run the benchmark; returns its document.

    Raises ConfigError when nobody may draft, IntegrityError for texts that differ beyond ties.
    """
    build: Callable[..., LLM] = LLM if make_llm is None else make_llm
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
    plain = build(**without_speculation(asked), **shared)
    try:
        speculative = build(**drafting | shared)
        try:
            return _compare(plain, speculative, shape)
        finally:
            speculative.close()
    finally:
        plain.close()


def _shared(asked: Mapping[str, object]) -> dict[str, object]:
    """Where nothing else was asked: half of a GPU's memory for each engine, one request at a time,
    and every prompt computed in every run.
    """
    options = engine_options(asked)
    shared: dict[str, object] = {}
    if "enable_prefix_cache" not in asked:
        shared["enable_prefix_cache"] = False
    if options.gpu_memory_utilization is None and local_device(options.device).device_type != "cpu":
        shared["gpu_memory_utilization"] = USUAL_SHARE / 2
    if options.max_num_seqs is None:
        shared["max_num_seqs"] = 1
    return shared


def _compare(plain: LLM, speculative: LLM, shape: SpeculativeShape) -> dict[str, object]:
    report = speculative.report()
    speculation = report["speculation"]
    forced = speculation["forced_tokens_per_round"]
    params = SamplingParams(temperature=0.0, max_tokens=shape.output_len, ignore_eos=True, seed=0)
    inputs = inputs_of(plain, shape.prompts)
    for llm in (plain, speculative):
        for _ in range(2):  # by then its shape has a graph, where it gets one
            llm.generate([inputs[0]], params, use_tqdm=False)
    runs = (in_turns(plain, speculative, each, params, repeats=shape.repeats) for each in inputs)
    pairs, is_cut = collect("prompts", runs, total=len(inputs), unit="prompt")
    prompts = shape.prompts[: len(pairs)]
    # Forced texts are wrong by design.
    texts = count_verdicts(plain, pairs, prompts, params) if forced is None else None
    totals = Acceptance.of(other.metrics for _, other in pairs)
    return {
        "device": {"name": report["device"], "type": report["options"]["device"]["value"]},
        "versions": report["versions"],
        "model": report["options"]["model"]["value"],
        "dtype": report["options"]["dtype"]["value"],
        "attention": report["attention"],
        "speculation": speculation,
        "forced": forced,
        "texts": texts,
        "output_len": shape.output_len,
        "acceptance": totals.to_json(),
        "plain_tok_s": total_rate([one for one, _ in pairs]),
        "speculative_tok_s": total_rate([other for _, other in pairs]),
        "speed_up": speed_up([other.rate / one.rate for one, other in pairs]),
        "prompts": [
            {
                "prompt": prompt.name,
                "kind": prompt.kind,
                "plain_tok_s": one.rate,
                "speculative_tok_s": other.rate,
                "speed_up": other.rate / one.rate,
                "acceptance": Acceptance.of([other.metrics]).to_json(),
            }
            for prompt, (one, other) in zip(prompts, pairs, strict=True)
        ],
        **cut_mark(is_cut),
    }


def table(document: Mapping[str, Any]) -> str:
    """The document for people."""
    shares = " ".join(f"{x:.0%}" for x in document["acceptance"]["accepted_by_position"])
    gain, texts = document["speed_up"], document["texts"]
    rows = [
        f"{document['model']} on {document['device']['name']}, attention "
        f"{document['attention']['name']}",
        drafter_words(document["speculation"]),
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


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
