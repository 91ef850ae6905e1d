"""Log-probabilities of the prompt are transformers', whatever way the prompt was computed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    llm_of,
    make_checkpoint,
    make_llm,
    random_prompts,
    recorded_steps,
    shared_prompts,
    tokens_of,
)

from covers import Cell
from paceline.core.errors import RequestError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import JoinDelta, RowLogprobs
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.step_plan import StepPlan
from paceline.llm.llm import LLM
from paceline.runner import prompt_logprobs as prompt_logprobs_module

TOLERANCE = 1e-4  # natural log units; float32 sums differ in order
SCORED = replace(GREEDY, max_tokens=3, prompt_logprobs=5)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Checkpoint:
    """Two cache groups, tied embeddings, and logits with a soft cap."""
    case = "gemma2-soft-caps-alternating-windows"
    return make_checkpoint(case, tmp_path_factory.mktemp("gemma"))


def assert_prompt_scored(output: RequestOutput, checkpoint: Checkpoint, *, top: int) -> None:
    prompt = list(output.prompt_token_ids)
    rows = output.prompt_logprobs
    assert rows is not None
    assert len(rows) == len(prompt)
    assert rows[0] is None
    theirs = checkpoint.logits(prompt)[:-1].log_softmax(-1)
    best = theirs.topk(top)
    for position, row in enumerate(rows[1:]):
        assert abs(row.chosen - theirs[position, prompt[position + 1]]) < TOLERANCE
        assert len(row.top_ids) == top
        found = torch.tensor(row.top_values)
        assert (found - best.values[position]).abs().max() < TOLERANCE if top else True
        assert (
            (found - theirs[position, list(row.top_ids)]).abs().max() < TOLERANCE if top else True
        )


CELLS: dict[str, Cell] = {
    "whole": {},
    "twin": {"overlap": False},
    "chunked": {"chunked_prefill_size": 7, "page_size": 4},
    "chunked-twin": {"chunked_prefill_size": 7, "page_size": 4, "overlap": False},
    "one-token-chunks": {"chunked_prefill_size": 1, "max_num_batched_tokens": 8},
    "no-cache-eager": {"enable_prefix_cache": False, "enforce_eager": True},
    "deferred": {"stream": "deferred", "chunked_prefill_size": 16},
}


@pytest.mark.parametrize("name", CELLS)
def test_every_prompt_token_is_scored_as_transformers_does(
    checkpoint: Checkpoint, name: str
) -> None:
    """Twice, so that the second time the whole prompt is in the cache, beside decoding rows."""
    prompts = [*shared_prompts(), [7], [7, 9]]
    params = [SCORED] * 7 + [replace(SCORED, prompt_logprobs=20)]
    with llm_of(checkpoint, CELLS[name], tight_pages={}) as llm:
        first = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
        assert_idle(llm)
    for output in [*first, *again]:
        top = 20 if len(output.prompt_token_ids) == 2 else 5
        assert_prompt_scored(output, checkpoint, top=top)
    assert {output.metrics.cached_tokens for output in first + again} == {0}
    assert tokens_of(first) == tokens_of(again)


def test_a_windowed_model_is_scored_too(gemma: Checkpoint) -> None:
    with make_llm(gemma, chunked_prefill_size=9, page_size=4) as llm:
        for output in llm.generate(shared_prompts(), SCORED):
            assert_prompt_scored(output, gemma, top=5)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_preempted_prompt_is_scored_once(checkpoint: Checkpoint, overlap: bool) -> None:
    """Preempted behind or within its prompt; computed again, and scored from where it stopped."""
    cell = {"pool": "tight", "chunked_prefill_size": 7, "overlap": overlap}
    params = replace(SCORED, max_tokens=40)
    with llm_of(checkpoint, cell, tight_pages={16: (13,)}, margin=0) as llm:
        with recorded_steps(llm) as steps:
            outputs = llm.generate(shared_prompts(), params)
        assert_idle(llm)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output in outputs:
        assert_prompt_scored(output, checkpoint, top=5)
    scored = sum(span.length for step in steps for span in step.prompt_spans)
    assert scored == sum(len(prompt) - 1 for prompt in shared_prompts())


def test_a_request_preempted_within_its_prompt_goes_on_where_its_scores_end(
    checkpoint: Checkpoint,
) -> None:
    """Its whole prompt is in the cache: it takes those pages whose tokens are scored already."""
    [prompt] = random_prompts([60], seed=5)
    with make_llm(checkpoint, chunked_prefill_size=10, page_size=4) as llm:
        llm.generate(prompt, replace(GREEDY, max_tokens=1))
        [tracker] = llm.submit([prompt], SCORED)
        for _ in range(3):
            llm.engine.step()
        scheduler = llm.engine.scheduler
        request = tracker.request
        assert 0 < request.num_scored < 59
        scheduler._preempt(request, StepPlan(64))
        with recorded_steps(llm) as steps:
            while not tracker.is_finished:
                llm.engine.step()
        [(step, join)] = [(s, d) for s in steps for d in s.deltas if isinstance(d, JoinDelta)]
        assert join.prefix_len == 28  # 30 tokens are scored by the steps that were in flight
        assert [(span.start, span.length) for span in step.prompt_spans] == [(2, 8)]
        assert_prompt_scored(tracker.snapshot(), checkpoint, top=5)


def test_neighbours_that_did_not_ask_use_the_cache_and_get_none(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([40])
    plain = replace(GREEDY, max_tokens=3)
    with make_llm(checkpoint, page_size=4) as llm:
        llm.generate(prompt, plain)
        mixed = llm.generate([prompt, prompt, prompt], [plain, SCORED, plain])
    assert [output.metrics.cached_tokens for output in mixed] == [36, 0, 36]
    assert [output.prompt_logprobs is None for output in mixed] == [True, False, True]
    assert_prompt_scored(mixed[1], checkpoint, top=5)


def test_what_a_scored_prompt_computed_is_shared_afterwards(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([40])
    with make_llm(checkpoint, page_size=4) as llm:
        llm.generate(prompt, SCORED)
        [after] = llm.generate(prompt, replace(GREEDY, max_tokens=1))
    assert after.metrics.cached_tokens == 36


def test_blocks_of_any_size_score_alike(checkpoint: Checkpoint, monkeypatch) -> None:
    prompts = random_prompts([23, 9])
    scores = []
    for rows in (1, 5, 1000):
        monkeypatch.setattr(prompt_logprobs_module, "PROMPT_BLOCK_ENTRIES", rows * 160)
        with make_llm(checkpoint) as llm:
            scores.append([each.prompt_logprobs for each in llm.generate(prompts, SCORED)])
    for other in scores[1:]:
        for ours, theirs in zip(flat(scores[0]), flat(other), strict=True):
            assert ours.top_ids == theirs.top_ids
            assert abs(ours.chosen - theirs.chosen) < TOLERANCE


def flat(scores: Sequence[Sequence[RowLogprobs | None]]) -> Iterator[RowLogprobs]:
    return (row for rows in scores for row in rows if row is not None)


def test_no_alternatives_are_there_when_none_are_asked_for(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm:
        [output] = llm.generate([5, 9, 33], replace(SCORED, prompt_logprobs=0))
    assert_prompt_scored(output, checkpoint, top=0)


def test_a_step_without_such_requests_has_no_spans(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm, recorded_steps(llm) as steps:
        llm.generate(random_prompts([20, 3]), replace(GREEDY, max_tokens=4, logprobs=2))
        assert not any(step.prompt_spans for step in steps)
        llm.generate(random_prompts([20, 3]), SCORED)
        assert [step.prompt_spans for step in steps if step.prompt_spans]


def test_streams_show_the_whole_prompt_with_the_first_token(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([30])
    with make_llm(checkpoint, chunked_prefill_size=7) as llm:
        shown = list(llm.generate(prompt, SCORED, stream=True))
    assert {len(output.prompt_logprobs) for output in shown} == {30}


def test_more_alternatives_than_tokens_are_refused() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        params = SamplingParams(**{name: 12})
        params.check_vocabulary(12)
        with pytest.raises(
            RequestError, match=f"{name} must be at most 11, the vocabulary size, g"
        ):
            params.check_vocabulary(11)


def test_an_aborted_prompt_keeps_what_was_scored(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([60])
    with make_llm(checkpoint, chunked_prefill_size=10) as llm:
        [tracker] = llm.submit([prompt], SCORED)
        for _ in range(3):
            llm.engine.step()
        llm.abort(tracker.request.request_id)
        snapshot = tracker.snapshot()
        assert 1 < len(snapshot.prompt_logprobs) < 60
        assert snapshot.outputs[0].finish_reason == "abort"
        assert_idle(llm)


def test_scores_do_not_depend_on_what_runs_beside(checkpoint: Checkpoint) -> None:
    prompts = random_prompts([33, 12, 50])
    with make_llm(checkpoint, enable_prefix_cache=False) as llm:
        alone = [flat_values(llm, prompt) for prompt in prompts]
        together = llm.generate(prompts, SCORED)
    for wanted, output in zip(alone, together, strict=True):
        found = torch.tensor([row.chosen for row in output.prompt_logprobs[1:]])
        assert (found - wanted).abs().max() < TOLERANCE


def flat_values(llm: LLM, prompt: list[int]) -> torch.Tensor:
    [output] = llm.generate(prompt, SCORED)
    return torch.tensor([row.chosen for row in output.prompt_logprobs[1:]])
