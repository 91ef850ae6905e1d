"""Pages at work: prefix hits, running out, and steps that need none."""

from dataclasses import replace

import pytest
from llm_cases import (
    GREEDY,
    Checkpoint,
    Tokens,
    assert_grows,
    assert_idle,
    make_head64_checkpoint,
    make_llm,
    random_prompts,
    recorded_steps,
    shared_prompts,
    tokens_of,
)

from paceline.core.step import JoinDelta, PageDelta
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.boot import Knobs
from paceline.runner.buffers import StepBuffers
from paceline.runner.staging import StagingSlot


@pytest.fixture(scope="module")
def answers(checkpoint: Checkpoint) -> list[Tokens]:
    """Transformers' greedy answers to the shared prompts."""
    return [checkpoint.generate(prompt, GREEDY.max_tokens) for prompt in shared_prompts()]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [16, 17, 32])
def test_a_fully_cached_prompt_works(checkpoint: Checkpoint, page_size: int, length: int) -> None:
    """At least one token is left to compute, at page boundaries too."""
    [prompt] = random_prompts([length], seed=7)
    with make_llm(checkpoint, page_size=page_size) as llm:
        first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert_idle(llm)
    assert first.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens == (length - 1) // page_size * page_size
    assert tokens_of([first, second]) == [checkpoint.generate(prompt, GREEDY.max_tokens)] * 2


def test_the_second_turn_of_a_chat_finds_the_first(checkpoint: Checkpoint) -> None:
    """Prompt and answer both; the last generated token has no KV yet."""
    first_turn, addition = random_prompts([20, 5], seed=8)
    params = replace(GREEDY, max_tokens=15)
    with make_llm(checkpoint, page_size=4) as llm:
        [answer] = tokens_of(llm.generate(first_turn, params))
        second_turn = [*first_turn, *answer, *addition]
        [output] = llm.generate(second_turn, params)
        assert_idle(llm)
    assert output.metrics.cached_tokens == (20 + 15 - 1) // 4 * 4
    assert output.outputs[0].token_ids == checkpoint.generate(second_turn, 15)


def test_running_out_of_pages_loses_and_repeats_nothing(
    checkpoint: Checkpoint, answers: list[Tokens]
) -> None:
    """Every stream of a preempted batch shows its solo answer, token by token."""
    knobs = Knobs(num_pages=(31,), admission_margin=0)
    shown: dict[str, list[RequestOutput]] = {}
    with make_llm(checkpoint, knobs=knobs, page_size=4, chunked_prefill_size=16) as llm:
        for output in llm.generate(shared_prompts(), GREEDY, stream=True):
            shown.setdefault(output.request_id, []).append(output)
            llm.engine.scheduler.check_integrity()
        assert_idle(llm)
    preemptions = 0
    for snapshots, answer in zip(shown.values(), answers, strict=True):
        assert_grows(snapshots, answer)
        assert snapshots[-1].outputs[0].token_ids == answer
        preemptions += snapshots[-1].metrics.preemptions
    assert preemptions >= 3


def test_100_steady_decode_steps_change_nothing_on_the_device(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page delta, no staged copy, no fill; admission reserves 256 tokens ahead."""
    calls: list[str] = []
    for owner, name in ((StepBuffers, "fill"), (StagingSlot, "put")):
        original = getattr(owner, name)

        def counted(self, *args, name=name, original=original):
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(owner, name, counted)
    prompts = random_prompts([10, 12, 14], seed=9)
    checkpoint = make_head64_checkpoint(tmp_path, context=256)
    with make_llm(checkpoint) as llm, recorded_steps(llm) as steps:
        stream = llm.generate(prompts, replace(GREEDY, max_tokens=None), stream=True)
        while len(steps) < 50:
            next(stream)
        before = len(calls)
        while len(steps) < 200:
            next(stream)
        assert len(calls) == before
        stream.close()
    deltas = [delta for step in steps for delta in step.deltas]
    assert sum(isinstance(delta, JoinDelta) for delta in deltas) == 3
    assert sum(isinstance(delta, PageDelta) for delta in deltas) == 3
    steady = steps[50:200]
    assert all(step.deltas == () and step.kind == "decode step" for step in steady)
