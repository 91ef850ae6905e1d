"""TurnLog: every turn is told with its step as it ran, and the loop it watches is the same loop."""

import pytest
from llm_cases import Checkpoint

from paceline.bench.turn_log import StepKind, TurnLog
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import RunKind
from paceline.engine import loop
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.runner.recording.graphs import AHEAD

PROMPTS = [[5] * 9, [6] * 30, [7] * 3]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)


def options(checkpoint: Checkpoint, **asked):
    return {"model": str(checkpoint.folder), "threads": 1, "max_num_seqs": 4, **asked}


def turns_of(checkpoint: Checkpoint, *, params=PARAMS, passes=1, **asked):
    """(turns, tokens of each request) of the last of some equal passes."""
    log = TurnLog()
    knobs = Knobs(around_turn=log.around, capture=AHEAD)
    with LLM(knobs=knobs, **options(checkpoint, enable_prefix_cache=False, **asked)) as llm:
        for _ in range(passes):
            trackers = llm.submit(PROMPTS, params)
            turns = []
            while not all(tracker.is_finished for tracker in trackers):
                turns.append(log.step(llm.engine))
            tokens = [tracker.snapshot().outputs[0].token_ids for tracker in trackers]
            while llm.engine.has_work:
                turns.append(log.step(llm.engine))
    return turns, tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_every_step_lands_one_turn_after_its_launch(checkpoint, overlap):
    turns, tokens = turns_of(checkpoint, overlap=overlap)
    launched = [turn.launched for turn in turns]
    assert [turn.landed for turn in turns] == [None, *launched[:-1]]
    assert launched[-1] is None
    assert sum(turn.num_tokens for turn in turns) == sum(map(len, tokens)) == 18
    assert sorted({name for turn in turns for name in turn.receivers}) == [
        f"request-{index}" for index in range(3)
    ]


def test_a_step_is_told_with_its_padding(checkpoint):
    turns, _ = turns_of(checkpoint, chunked_prefill_size=16)
    steps = [turn.launched for turn in turns if turn.launched is not None]
    assert {step.kind for step in steps} == {StepKind.PREFILL, StepKind.MIXED, StepKind.DECODE}
    assert steps[0].tokens == 9 + 16 + 3
    assert all(step.padded_tokens >= step.tokens for step in steps)
    decode = next(step for step in steps if step.kind is StepKind.DECODE)
    assert (decode.rows, decode.tokens, decode.padded_tokens) == (3, 3, 3)


def test_a_shape_is_eager_then_captured_then_replayed(checkpoint):
    runs = [
        turn.launched.run
        for turn in turns_of(checkpoint, max_num_seqs=3)[0]
        if turn.launched is not None and turn.launched.kind is StepKind.DECODE
    ]
    assert set(runs) == {RunKind.GRAPH}, "the largest decode is captured at boot"
    runs = [
        turn.launched.run
        for turn in turns_of(checkpoint, max_num_seqs=8)[0]
        if turn.launched is not None and turn.launched.kind is StepKind.DECODE
    ]
    assert runs[:3] == [RunKind.EAGER, RunKind.CAPTURE, RunKind.GRAPH]
    assert set(runs[3:]) <= {RunKind.GRAPH}
    turns, _ = turns_of(checkpoint, enforce_eager=True)
    assert {turn.launched.run for turn in turns if turn.launched} == {RunKind.EAGER}


def test_the_parts_of_a_turn_are_the_turn(checkpoint):
    turns, _ = turns_of(checkpoint)
    for turn in turns:
        parts = turn.schedule_s + turn.launch_s + turn.wait_s + turn.process_s + turn.text_s
        assert parts == pytest.approx(turn.seconds)
        assert (turn.launch_s > 0) == (turn.launched is not None)
        assert (turn.process_s > 0) == (turn.landed is not None)


def test_rounds_are_told_as_rounds(checkpoint):
    turns, tokens = turns_of(checkpoint, speculative_algorithm="NGRAM", speculative_num_steps=3)
    rounds = [t.launched for t in turns if t.launched and t.launched.kind is StepKind.ROUND]
    assert rounds
    assert all(each.tokens == 4 * each.rows for each in rounds)
    assert sum(turn.num_tokens for turn in turns) == sum(map(len, tokens))


def test_an_engine_nobody_watches_runs_the_loop_itself(checkpoint):
    with LLM(**options(checkpoint)) as llm:
        assert llm.engine._turn is loop.overlapped_turn
