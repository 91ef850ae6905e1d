"""The losslessness prover: the same prompts with and without speculation, or on two backends.

Contenders answer first, one engine after the other; then the reference, which decodes plainly,
answers, and tells of every difference whether it is a tie.  Where it is not, the contender is built
once more, and both compute the tokens before the earliest difference, layer by layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.core.options.engine_options import known
from paceline.core.progress import collect
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance, read_band
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.draft_self_test import BELOW_BAND
from paceline.llm.llm import LLM
from paceline.llm.teacher import Teacher, TeacherForm
from paceline.proof.lossless.contest import Contestant
from paceline.proof.lossless.faulty_layer import Blame, Expected, LayerCase, blame, expect
from paceline.proof.lossless.prompt_set import NamedPrompt, inputs_of
from paceline.proof.lossless.proof import Answered, BandReading, Comparison, Contest, Fault, Proof
from paceline.proof.lossless.verdicts import TIE_ULPS, Parting, Verdict, part

MakeLLM = Callable[..., LLM]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What every engine is asked.  Raises RequestError for what no engine can be."""

    prompts: tuple[NamedPrompt, ...]
    max_tokens: int = 64
    temperature: float = 0.8  # of the seeded answers
    top_p: float = 0.95
    seed: int = 0  # of the first prompt; each has its own

    def __post_init__(self) -> None:
        self.params()

    def params(self) -> dict[str, list[SamplingParams]]:
        """Way of sampling -> [num_prompts]."""
        greedy = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        seeded = replace(greedy, temperature=self.temperature, top_p=self.top_p)
        count = range(len(self.prompts))
        return {
            "greedy": [replace(greedy, seed=self.seed + index) for index in count],
            "seeded": [replace(seeded, seed=self.seed + index) for index in count],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A difference that is no tie."""

    prompt: str
    sampling: str
    case: LayerCase
    expected: Expected


@dataclass(slots=True, kw_only=True)
class _Standing:
    """A contender and what is known of it so far."""

    contender: Contestant
    attention: str
    answers: dict[str, list[RequestOutput]]  # way of sampling -> [num_prompts]
    band: BandReading | None
    comparisons: list[Comparison] = field(default_factory=list)
    bug: Bug | None = None


def prove(
    reference: Mapping[str, object],
    contenders: Sequence[Contestant],
    trial: Trial,
    *,
    make_llm: MakeLLM = LLM,
) -> Proof:
    """Compare every contender with the engine of the options `reference`.

    Raises what building an engine and generating raise.
    """
    standings = [_answer(contender, trial, make_llm) for contender in contenders]
    llm = make_llm(**reference)
    try:
        prepared = llm.prepared
        dtype = prepared.dtype
        answers = _generate(llm, trial)

        def judge(standing: _Standing) -> _Standing:
            _compare(standing, answers, trial, llm.teacher(), dtype)
            standing.bug = _earliest_bug(standing, answers, llm, dtype)
            return standing

        judged, is_cut = collect(
            "contenders", map(judge, standings), total=len(standings), unit="contender"
        )
    finally:
        llm.close()
    return Proof(
        model=prepared.options.model,
        device=prepared.device.name,
        dtype=known(prepared.options.dtype),
        attention=prepared.attention.name,
        tie_ulps=TIE_ULPS[dtype],
        contests=tuple(_contest(standing, make_llm) for standing in judged),
        is_cut=is_cut,
    )


def _answer(contender: Contestant, trial: Trial, make_llm: MakeLLM) -> _Standing:
    llm = make_llm(**contender.options)
    try:
        return _Standing(
            contender=contender,
            attention=llm.prepared.attention.name,
            answers=_generate(llm, trial),
            band=_band(llm, contender),
        )
    finally:
        llm.close()


def _generate(llm: LLM, trial: Trial) -> dict[str, list[RequestOutput]]:
    prompts = inputs_of(llm, trial.prompts)
    return {way: llm.generate(prompts, params) for way, params in trial.params().items()}


def _band(llm: LLM, contender: Contestant) -> BandReading | None:
    """The drafter on the prompts of its band, where it brings one that holds for its depth."""
    speculation = contender.speculation
    source = None if speculation is None else speculation.drafter.source
    if speculation is None or source is None or source.folder is None:
        return None
    if contender.options.get("load_format") == "dummy":
        return None
    band = read_band(source.folder)
    if band is None or not band.holds_for(speculation.shape.num_steps):
        return None
    params = SamplingParams(temperature=0.0, max_tokens=band.max_tokens)
    outputs = llm.generate(list(band.prompts), params)
    said = [each.detail for each in llm.prepared.events.counts() if each.reason == BELOW_BAND]
    return BandReading(
        band=band,
        tokens_per_round=_acceptance(outputs).mean_tokens_per_round,
        detail=said[0] if said else None,
    )


def _compare(
    standing: _Standing,
    answers: Mapping[str, Sequence[RequestOutput]],
    trial: Trial,
    teacher: Teacher,
    dtype: torch.dtype,
) -> None:
    """Give the contender its comparisons."""
    for way, params in trial.params().items():
        rows = zip(trial.prompts, params, answers[way], standing.answers[way], strict=True)
        found = []
        for prompt, wanted_params, wanted, got in rows:
            parting = _part(wanted, got, wanted_params, teacher, dtype)
            found.append(
                Answered(
                    prompt=prompt.name,
                    num_tokens=len(wanted.outputs[0].token_ids),
                    parting=parting,
                    verdict=Verdict.EQUAL if parting is None else parting.verdict(dtype),
                )
            )
        acceptance = _acceptance(standing.answers[way])
        standing.comparisons.append(
            Comparison(sampling=way, answers=tuple(found), acceptance=acceptance)
        )


def _part(
    wanted: RequestOutput,
    got: RequestOutput,
    params: SamplingParams,
    teacher: Teacher,
    dtype: torch.dtype,
) -> Parting | None:
    prompt = wanted.prompt_token_ids

    def logits_behind(generated: Sequence[int]) -> torch.Tensor:
        tokens = (*prompt, *generated)
        return teacher.read(tokens, TeacherForm.plain(len(tokens))).logits

    return part(
        wanted.outputs[0].token_ids,
        got.outputs[0].token_ids,
        logits_behind,
        params=params,
        num_known=len(prompt),
        dtype=dtype,
    )


def _earliest_bug(
    standing: _Standing,
    answers: Mapping[str, Sequence[RequestOutput]],
    llm: LLM,
    dtype: torch.dtype,
) -> Bug | None:
    """The bug with the fewest tokens before it, and what the reference makes of these."""
    bugs = []
    for comparison in standing.comparisons:
        for answered, output in zip(comparison.answers, answers[comparison.sampling], strict=True):
            if answered.verdict is not Verdict.BUG or answered.parting is None:
                continue
            prompt = output.prompt_token_ids
            tokens = (*prompt, *output.outputs[0].token_ids[: answered.parting.index])
            case = LayerCase(tokens=tokens, num_prompt=len(prompt), dtype=dtype)
            bugs.append((len(tokens), comparison.sampling, answered.prompt, case))
    if not bugs:
        return None
    _, sampling, name, case = min(bugs, key=lambda bug: bug[0])
    return Bug(prompt=name, sampling=sampling, case=case, expected=expect(llm, case))


def _contest(standing: _Standing, make_llm: MakeLLM) -> Contest:
    contender, bug = standing.contender, standing.bug
    fault = None
    if bug is not None:
        found = _blame(contender, bug, make_llm)
        fault = Fault(
            prompt=bug.prompt, sampling=bug.sampling, layer=found.layer, detail=found.detail
        )
    return Contest(
        label=contender.label,
        attention=standing.attention,
        speculation=None if contender.speculation is None else str(contender.speculation),
        comparisons=tuple(standing.comparisons),
        fault=fault,
        band=standing.band,
    )


def _blame(contender: Contestant, bug: Bug, make_llm: MakeLLM) -> Blame:
    llm = make_llm(**contender.options)
    try:
        shape = None if contender.speculation is None else contender.speculation.shape
        return blame(llm, bug.case, bug.expected, shape)
    finally:
        llm.close()


def _acceptance(outputs: Sequence[RequestOutput]) -> Acceptance:
    return Acceptance.total(each.metrics.acceptance for each in outputs if each.metrics is not None)
