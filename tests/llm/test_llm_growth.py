"""Growths tell everything once: joined, they are the snapshot."""

from dataclasses import replace

import pytest
from llm_cases import Checkpoint, assert_idle, make_llm, random_prompts

from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import CompletionOutput, RequestOutput, joined
from paceline.engine.answers.tracker import Tracker
from paceline.llm.llm import LLM

SAMPLED = SamplingParams(seed=3, n=3, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> LLM:
    return make_llm(checkpoint, chunked_prefill_size=7)


def grown(llm: LLM, tracker: Tracker, *, every: int = 1) -> list[RequestOutput]:
    """What is told to a caller that asks after every few turns."""
    growths = []
    while not tracker.is_finished:
        for _ in range(every):
            if not tracker.is_finished:
                llm.engine.step()
        growths.append(tracker.growth(CompletionOutput, RequestOutput))
    assert_idle(llm)
    return growths


@pytest.mark.parametrize("every", [1, 5, 1000])
@pytest.mark.parametrize("stop", [False, True])
def test_joined_growths_are_the_snapshot(llm: LLM, every: int, stop: bool) -> None:
    [prompt] = random_prompts([20])
    params = SAMPLED
    if stop:
        [free] = llm.generate(prompt, params)
        params = replace(params, stop=free.outputs[1].text[10:14])
    [tracker] = llm.submit(prompt, params)
    assert joined(grown(llm, tracker, every=every)) == tracker.snapshot()


def test_nothing_is_told_twice(llm: LLM) -> None:
    """So a stream costs what it says, not the square of it."""
    [tracker] = llm.submit(random_prompts([20]), SAMPLED)
    growths = grown(llm, tracker)
    whole = tracker.snapshot().outputs
    pieces = [piece for growth in growths for piece in growth.outputs]
    assert sum(len(piece.token_ids) for piece in pieces) == 60
    assert sum(len(piece.logprobs) for piece in pieces) == 60
    assert sum(len(piece.text) for piece in pieces) == sum(len(each.text) for each in whole)
    for piece in pieces:
        final, chars, tokens = whole[piece.index], piece.num_chars_before, piece.num_tokens_before
        assert final.text[chars : chars + len(piece.text)] == piece.text
        assert final.token_ids[tokens : tokens + len(piece.token_ids)] == piece.token_ids
    firsts = [growth for growth in growths if growth.prompt_logprobs is not None]
    assert all(any(p.num_tokens_before == 0 for p in growth.outputs) for growth in firsts)
    assert tracker.growth(CompletionOutput, RequestOutput).outputs == ()


def test_an_abort_releases_held_text_and_is_told_once(llm: LLM, checkpoint: Checkpoint) -> None:
    """The last letters may begin the stop string, so they are held back until the end."""
    [prompt] = random_prompts([20], seed=4)
    text = llm.generate(prompt, replace(SAMPLED, n=1))[0].outputs[0].text
    [tracker] = llm.submit([prompt], replace(SAMPLED, n=1, stop=f"{text[:12]}?"))
    while tracker.num_tokens < 6:
        llm.engine.step()
    before = tracker.growth(CompletionOutput, RequestOutput)
    assert before.outputs[0].text == ""
    llm.abort(tracker.request.request_id)
    after = tracker.growth(CompletionOutput, RequestOutput)
    assert (after.outputs[0].text, after.outputs[0].finish_reason) == (text[:12], "abort")
    assert after.outputs[0].num_tokens_before == 6
    assert tracker.growth(CompletionOutput, RequestOutput).outputs == ()
    while llm.engine.has_work:
        llm.engine.step()
