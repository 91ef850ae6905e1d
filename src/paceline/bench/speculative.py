"""What speculation gains: acceptance by position, tokens per round, and the speed-up.

    python -m paceline bench speculative --model bundled --speculative-algorithm NGRAM

Two engines of the same model stand side by side; prompts come one at a time, in turns, greedy, end
tokens ignored.  A rate is that of the tokens behind the first.  The speed-up is the geometric mean
over the prompts of the two rates' quotient, with a bootstrap interval over the prompts.  It is told
only of texts that are equal up to ties.  Forced acceptance compares hardware: its texts are wrong,
nobody compares them, and every line says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.bench.page import Bars, bars
from paceline.bench.paired_runs import (
    SpeedUp,
    Texts,
    count_verdicts,
    in_turns,
    speed_up,
    total_rate,
)
from paceline.bench.speculative_shape import SpeculativeShape
from paceline.bench.subject import document, drafter_of, drafter_words
from paceline.core.errors import ConfigError
from paceline.core.options.asked import engine_options
from paceline.core.options.engine_options import known
from paceline.core.progress import collect
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance
from paceline.llm.llm import LLM
from paceline.llm.prepare import Prepared
from paceline.plan.machine import local_device
from paceline.plan.speculation import without_speculation
from paceline.proof.lossless.drafting import with_drafter
from paceline.proof.lossless.prompt_set import inputs_of

USUAL_SHARE = 0.9  # of a GPU's memory, for both engines together


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """One prompt on both engines.  Rates are of the tokens behind the first, per second."""

    prompt: str  # its name
    kind: str
    plain_tok_s: float
    speculative_tok_s: float
    speed_up: float
    acceptance: Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeReport:
    """What was found."""

    prepared: Prepared  # the engine that drafts
    dtype: str
    forced: float | None  # tokens per round, whatever was sampled
    texts: Texts | None  # None: they are wrong by design
    output_len: int
    acceptance: Acceptance
    plain_tok_s: float
    speculative_tok_s: float
    speed_up: SpeedUp
    prompts: tuple[PromptResult, ...]
    is_cut: bool  # by Ctrl-C

    def to_json(self) -> dict[str, Any]:
        """The document."""
        device = self.prepared.device
        return {**document(self), "device": {"name": device.name, "type": device.device_type}}

    def table(self) -> str:
        """For people; each line says where acceptance was forced."""
        shares = " ".join(f"{share:.0%}" for share in self.acceptance.by_position)
        gain = self.speed_up
        rows = [
            f"{self.prepared.options.model} on {self.prepared.device.name}, attention "
            f"{self.prepared.attention.name}",
            drafter_words(drafter_of(self.prepared)),
            f"{'prompt':<16}{'plain tok/s':>13}{'speculative':>13}{'speed-up':>10}"
            f"{'per round':>11}",
        ]
        rows += [
            f"{each.prompt:<16}{each.plain_tok_s:>13.1f}{each.speculative_tok_s:>13.1f}"
            f"{each.speed_up:>10.2f}{_number(each.acceptance.mean_tokens_per_round):>11}"
            for each in self.prompts
        ]
        rows += [
            f"mean_tokens_per_round {_number(self.acceptance.mean_tokens_per_round)} (bonus "
            f"tokens included, a request's first token not), accepted by position {shares}",
            f"plain {self.plain_tok_s:.1f} tok/s, speculative {self.speculative_tok_s:.1f} tok/s",
            f"speed-up {gain.mean:.2f}, {gain.confidence:.0%} interval {gain.low:.2f} to "
            f"{gain.high:.2f}",
        ]
        if self.texts is not None:
            rows.append(f"texts: {self.texts.equal} equal, {self.texts.tie} tie")
        else:
            rows.append("texts are wrong and were not compared")
        return "\n".join(self._forced_word + row for row in rows)

    def drawings(self) -> list[Bars]:
        """Each title says where acceptance was forced."""
        word, prompts = self._forced_word, [(each.prompt, each) for each in self.prompts]
        shares = enumerate(self.acceptance.by_position, 1)
        return [
            Bars(
                title=f"{word}Drafts accepted, by position [%]",
                rows=[(f"draft {place}", 100 * share) for place, share in shares],
            ),
            bars(f"{word}Speed-up over plain decoding", prompts, "speed_up", form=".2f"),
            bars(f"{word}Plain decoding [tokens/s]", prompts, "plain_tok_s"),
            bars(f"{word}With drafts [tokens/s]", prompts, "speculative_tok_s"),
        ]

    @property
    def _forced_word(self) -> str:
        return "" if self.forced is None else f"FORCED to {self.forced:g} tokens per round: "


def bench_speculative(
    asked: Mapping[str, object],
    shape: SpeculativeShape,
    *,
    make_llm: Callable[..., LLM] | None = None,
) -> SpeculativeReport:
    """Run the benchmark.

    Raises ConfigError when nobody may draft, IntegrityError for texts that differ beyond ties.
    """
    build: Callable[..., LLM] = LLM if make_llm is None else make_llm
    drafting = with_drafter(asked)
    if drafting is None:
        raise ConfigError.about(
            "speculative_algorithm",
            expected="a drafter",
            got="off",
            remedy="name one, or leave the flag out",
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


def _compare(plain: LLM, speculative: LLM, shape: SpeculativeShape) -> SpeculativeReport:
    forced = drafter_of(speculative.prepared).forced
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
    return SpeculativeReport(
        prepared=speculative.prepared,
        dtype=known(speculative.prepared.options.dtype),
        forced=forced,
        texts=texts,
        output_len=shape.output_len,
        acceptance=Acceptance.total(other.metrics.acceptance for _, other in pairs),
        plain_tok_s=total_rate([one for one, _ in pairs]),
        speculative_tok_s=total_rate([other for _, other in pairs]),
        speed_up=speed_up([other.rate / one.rate for one, other in pairs]),
        prompts=tuple(
            PromptResult(
                prompt=prompt.name,
                kind=prompt.kind,
                plain_tok_s=one.rate,
                speculative_tok_s=other.rate,
                speed_up=other.rate / one.rate,
                acceptance=other.metrics.acceptance,
            )
            for prompt, (one, other) in zip(prompts, pairs, strict=True)
        ),
        is_cut=is_cut,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
