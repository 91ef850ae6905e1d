"""One busy hour in small: requests of every kind at once, served plainly and with a drafter."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from draft_checkpoints import save_eagle, save_eagle3, save_relative, soften
from llm_cases import (
    CONTEXT,
    Checkpoint,
    assert_idle,
    assert_same_or_tie,
    llm_of,
    make_checkpoint,
    make_llm,
    random_prompts,
    shared_prompts,
    text_of,
)

from covers import Cell
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.request import FinishReason
from paceline.llm.llm import LLM

LLAMA = "llama-gqa2-untied"
ROWS = 4
STEPS = 3
LOGPROB_TOLERANCE = 1e-4
MODEL_DRAFTERS = ("EAGLE", "EAGLE3", "STANDALONE")
DRAFTERS = (*MODEL_DRAFTERS, "NGRAM")
TOPK = (1, 2, 4, 8)

PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True),
    "every-processor": SamplingParams(
        temperature=0.8,
        top_k=40,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={7: 2.0, 90: -3.0, 2: 3.0},
        min_tokens=6,
    ),
    "logprobs": SamplingParams(temperature=0.8, top_p=0.95, logprobs=3),
}
AXES: dict[str, tuple[Any, ...]] = {
    "drafter": DRAFTERS,
    "topk": TOPK,
    "page_size": (1, 16, 64),
    "enforce_eager": (False, True),
    "params": tuple(PARAMS),
    "overlap": (True, False),
    "pool": ("roomy", "tight"),
    "chunked_prefill_size": (1024, 7),
    "enable_prefix_cache": (True, False),
    "stream": ("inline", "deferred"),
}


@dataclass(frozen=True)
class Job:
    """A request, when it comes, and when its caller leaves."""

    prompt: list[int]
    params: SamplingParams
    turn: int = 0  # of the engine, before which it is submitted
    abort_at: int | None = None  # tokens; None: it stays


Jobs = Mapping[str, Job]
Served = dict[str, RequestOutput]


@dataclass(frozen=True)
class Truth:
    """A checkpoint and its drafters; jobs, and what plain decoding makes of them, by parameters."""

    checkpoint: Checkpoint
    drafters: Mapping[str, Path]
    jobs: Mapping[str, Jobs]
    answers: Mapping[str, Served]

    def speculation(self, drafter: str, topk: int = 1, steps: int = STEPS) -> dict[str, Any]:
        """Options of an engine."""
        options: dict[str, Any] = {
            "speculative_algorithm": drafter,
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
        }
        if drafter == "NGRAM":
            return options | {"speculative_ngram_min": 1}
        if drafter == "MTP":
            return options
        return options | {"speculative_draft_model_path": str(self.drafters[drafter])}


def llama_truth(folder: Path, kinds: Sequence[str] = tuple(PARAMS)) -> Truth:
    """A llama, and drafters that guess well."""
    target = make_checkpoint(LLAMA, folder / "target", change=soften)
    drafters = {
        "EAGLE": save_eagle(target, folder / "eagle"),
        "EAGLE3": save_eagle3(target, folder / "eagle3"),
        "STANDALONE": save_relative(LLAMA, folder / "relative", noise=0.1),
    }
    return truth_of(target, drafters, kinds)


def truth_of(target: Checkpoint, drafters: Mapping[str, Path], kinds: Sequence[str]) -> Truth:
    """Jobs of each kind, and their answers without a drafter, as many at once as fit."""
    jobs: dict[str, Jobs] = {}
    answers: dict[str, Served] = {}
    with make_llm(target) as llm:
        for kind in kinds:
            jobs[kind] = busy_jobs(llm, PARAMS[kind])
            prompts = [job.prompt for job in jobs[kind].values()]
            found = llm.generate(prompts, [job.params for job in jobs[kind].values()])
            answers[kind] = dict(zip(jobs[kind], found, strict=True))
    return Truth(target, drafters, jobs, answers)


def busy_jobs(llm: LLM, base: SamplingParams) -> Jobs:
    """More than fit at once, each with something of its own.  `llm` says where texts can stop."""
    shared, others = shared_prompts(), random_prompts((1, 100, 5, 24), seed=8)
    one, long, short, split = others

    def params(seed: int, tokens: int | None, **own: Any) -> SamplingParams:
        own["min_tokens"] = min(base.min_tokens, tokens or base.min_tokens)
        return replace(base, seed=seed, max_tokens=tokens, **own)

    def answer(prompt: list[int], wanted: SamplingParams) -> tuple[int, ...]:
        return llm.generate(prompt, wanted)[0].outputs[0].token_ids

    likeliest: dict[str, Any] = dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0)
    likeliest |= {"top_k": 1, "repetition_penalty": 1.0, "logit_bias": (), "ignore_eos": True}
    ending = params(4, 40, ignore_eos=True)
    text = text_of(answer(split, ending)[13:15])[1:]  # begins within a token
    stop_id = answer(shared[2], ending)[17]
    jobs = {
        "first": Job(shared[0], params(1, 46)),
        "context-end": Job(long, params(2, None, ignore_eos=True)),
        "one-token-prompt": Job(one, params(3, 37)),
        "repeats": Job(shared[0][1:], params(9, 46, **likeliest)),
        "plain": Job(shared[1], params(5, 30, speculative=False)),
        "stop-string": Job(split, replace(ending, stop=(text,)), turn=3),
        "stop-id": Job(shared[2], replace(ending, stop_token_ids=(stop_id,)), turn=4),
        "leaves": Job(shared[3], params(6, 44), turn=5, abort_at=11),
        "siblings": Job(shared[4], params(7, 24, n=2), turn=6),
        "shared-prefix": Job(shared[5], params(8, 33), turn=9),
    }
    for tokens in range(1, 9):
        jobs[f"ends-at-{tokens}"] = Job(short, params(20 + tokens, tokens), turn=4 + 3 * tokens)
    return jobs


def serve(llm: LLM, jobs: Jobs) -> Served:
    """All jobs, as they come and leave; the engine is idle behind them."""
    waiting, trackers, turn = dict(jobs), {}, 0
    while waiting or not all(tracker.is_finished for tracker in trackers.values()):
        for name in [name for name, job in waiting.items() if job.turn <= turn]:
            job = waiting.pop(name)
            trackers[name] = llm.submit([job.prompt], [job.params])[0]
        llm.engine.step()
        turn += 1
        for name, tracker in trackers.items():
            leaves_at = jobs[name].abort_at
            if leaves_at is not None and tracker.num_tokens >= leaves_at:
                llm.abort(tracker.request.request_id)
    assert_idle(llm)
    return {name: tracker.snapshot() for name, tracker in trackers.items()}


def check_served(truth: Truth, kind: str, served: Served) -> None:
    """Text, ends and log-probabilities are those of plain decoding."""
    for name, found in served.items():
        job, plain = truth.jobs[kind][name], truth.answers[kind][name]
        for expected, got in zip(plain.outputs, found.outputs, strict=True):
            with _named(name):
                _check(truth, job, expected, got)


def _check(truth: Truth, job: Job, expected: CompletionOutput, got: CompletionOutput) -> None:
    tokens = expected.token_ids
    if got.finish_reason is FinishReason.ABORT:
        assert job.abort_at is not None
        assert job.abort_at <= len(got.token_ids) < len(tokens)
        tokens = tokens[: len(got.token_ids)]
    elif tokens == got.token_ids:
        assert got.text == expected.text
        assert got.finish_reason is expected.finish_reason
        assert got.stop_reason == expected.stop_reason
    if job.params.temperature == 0.0:
        assert_same_or_tie(got.token_ids, tokens, truth.checkpoint.gap(job.prompt))
    else:
        assert got.token_ids == tokens
    if expected.logprobs is not None:
        _check_logprobs(expected, got)


def _check_logprobs(expected: CompletionOutput, got: CompletionOutput) -> None:
    assert got.logprobs is not None
    assert len(got.logprobs) == len(got.token_ids)
    for plain, drafted in zip(expected.logprobs or (), got.logprobs, strict=False):
        values = zip(
            (plain.chosen, *plain.top_values), (drafted.chosen, *drafted.top_values), strict=True
        )
        assert all(abs(a - b) < LOGPROB_TOLERANCE for a, b in values), (plain, drafted)


@contextmanager
def _named(job: str) -> Iterator[None]:
    """Says whose assertion failed."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"job {job}")
        raise


def check_metrics(jobs: Jobs, served: Served, *, num_draft_tokens: int) -> None:
    """Counts of rounds agree with the tokens that came of them."""
    for name, output in served.items():
        metrics, job = output.metrics, jobs[name]
        assert metrics is not None, name
        accepted = metrics.accepted_by_position
        assert list(accepted) == sorted(accepted, reverse=True), name
        assert metrics.drafted_tokens == metrics.rounds * (num_draft_tokens - 1), name
        if not job.params.speculative:
            assert metrics.rounds == 0, name
            continue
        emitted = metrics.rounds + sum(accepted)
        assert (metrics.tokens_per_round or 0.0) * metrics.rounds == pytest.approx(emitted), name
        is_whole = job.abort_at is None and not job.params.stop and not metrics.preemptions
        if is_whole:
            assert emitted == metrics.output_tokens - job.params.n, name


def preemptions(served: Served) -> int:
    return sum(output.metrics.preemptions for output in served.values() if output.metrics)


def accepted(served: Served) -> int:
    """Drafts that were taken."""
    return sum(sum(out.metrics.accepted_by_position) for out in served.values() if out.metrics)


def tight_pages(page_size: int, num_groups: int, reach: int) -> dict[int, tuple[int, ...]]:
    """Pools in which the longest request fits and two more do not."""
    longest = CONTEXT - 1 + reach
    pages = -(-longest // page_size) + 1
    return {page_size: (pages + (page_size < 64) * 16 // page_size,) * num_groups}


def drafting_llm(truth: Truth, cell: Cell, *, num_groups: int | None = None, **own: Any) -> LLM:
    """The engine of a cell; its parameters' kind is the caller's."""
    chosen = {name: value for name, value in cell.items() if name not in ("drafter", "params")}
    drafter, topk = cell["drafter"], chosen.pop("topk")
    groups = num_groups or (1 if drafter == "NGRAM" else 2)
    reach = 1 + topk * STEPS
    return llm_of(
        truth.checkpoint,
        chosen,
        tight_pages=tight_pages(cell.get("page_size", 16), groups, max(reach, 2 * topk)),
        margin=0,
        **{"max_num_seqs": ROWS} | truth.speculation(drafter, topk) | own,
    )


def with_chosen(cells: list[Cell], axes: Mapping[str, tuple[Any, ...]]) -> list[Cell]:
    """Each cell with one value of each of `axes` besides, not in step with the cell's own."""
    rng = random.Random(1)
    return [
        dict(cell) | {name: rng.choice(values) for name, values in axes.items()} for cell in cells
    ]
