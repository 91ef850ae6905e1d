"""Prompts on two engines in turns: how long their tokens took, and whether texts are the same."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from paceline.core.errors import IntegrityError
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestMetrics, RequestOutput
from paceline.llm.inputs import Prompt
from paceline.llm.llm import LLM
from paceline.proof.lossless.judge import Judge
from paceline.proof.lossless.prompt_set import NamedPrompt
from paceline.proof.lossless.verdicts import Verdict

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One prompt on one engine: the median run of its decode."""

    output: RequestOutput  # of the last run
    decode_s: float  # from the first token to the last

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.output.outputs[0].token_ids

    @property
    def metrics(self) -> RequestMetrics:
        return _metrics(self.output)

    @property
    def rate(self) -> float:
        """Tokens behind the first, per second."""
        return (len(self.tokens) - 1) / max(self.decode_s, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """How many are the same on both engines, and how many are up to ties."""

    equal: int
    tie: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """A mean, and the interval that holds it with so much confidence."""

    mean: float
    low: float
    high: float
    confidence: float


def in_turns(
    plain: LLM, speculative: LLM, prompt: Prompt, params: SamplingParams, *, repeats: int
) -> tuple[Timed, Timed]:
    """One prompt on both engines, one after the other, several times."""
    runs: tuple[list[RequestOutput], list[RequestOutput]] = ([], [])
    for _ in range(repeats):
        for llm, found in zip((plain, speculative), runs, strict=True):
            found += llm.generate([prompt], params, use_tqdm=False)
    one, other = (_timed(found) for found in runs)
    return one, other


def count_verdicts(
    plain: LLM,
    pairs: Sequence[tuple[Timed, Timed]],
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
) -> Texts:
    """Raises IntegrityError for a text that is neither equal nor a tie.

    plain: the engine that decoded plainly; it must be idle.
    """
    judge = Judge(plain)
    num_ties = 0
    for prompt, (one, other) in zip(prompts, pairs, strict=True):
        parting = judge.part(one.output.prompt_token_ids, one.tokens, other.tokens, params)
        verdict = judge.verdict(parting)
        num_ties += verdict is Verdict.TIE
        if parting is not None and verdict is Verdict.BUG:
            raise IntegrityError.about(
                f"text of '{prompt.name}' with speculation",
                expected="that of plain decoding, up to ties",
                got=f"token {parting.got} for {parting.wanted} at output {parting.index}, "
                f"{parting.gap_ulps} ulps apart",
                remedy="there is no speed-up to tell of; run `paceline prove`",
            )
    return Texts(equal=len(pairs) - num_ties, tie=num_ties)


def _timed(outputs: Sequence[RequestOutput]) -> Timed:
    seconds = []
    for metrics in map(_metrics, outputs):
        assert metrics.latency_s is not None, "a finished request has tokens"
        assert metrics.ttft_s is not None, "a finished request has tokens"
        seconds.append(metrics.latency_s - metrics.ttft_s)
    return Timed(output=outputs[-1], decode_s=median(seconds))


def _metrics(output: RequestOutput) -> RequestMetrics:
    assert output.metrics is not None, "a finished request has metrics"
    return output.metrics


def speed_up(ratios: Sequence[float]) -> SpeedUp:
    """The geometric mean of ratios, and what 95 of 100 resamples of them span; fixed seed."""
    source = random.Random(0)
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted(sum(source.choices(logs, k=len(logs))) / len(logs) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    low, high = math.exp(means[tail]), math.exp(means[-1 - tail])
    return SpeedUp(mean=geometric_mean(ratios), low=low, high=high, confidence=CONFIDENCE)


def total_rate(timed: Sequence[Timed]) -> float:
    """Of all tokens behind the first ones."""
    tokens = sum(len(each.tokens) - 1 for each in timed)
    return tokens / max(sum(each.decode_s for each in timed), 1e-9)
