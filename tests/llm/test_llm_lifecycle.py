"""The life of requests: streams, aborts, shared pages, queues, preemption, a closed LLM."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from llm_cases import (
    GREEDY,
    Checkpoint,
    Tokens,
    assert_grows,
    assert_idle,
    make_llm,
    random_prompts,
    shared_prompts,
    text_of,
    tokens_of,
)

from cache_probe import num_shared_pages
from paceline.core.errors import PacelineError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Step
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.runner.outputs_ring import LaunchedStep


@pytest.fixture(scope="module")
def answers(checkpoint: Checkpoint) -> list[Tokens]:
    """Transformers' greedy answers to the shared prompts."""
    return [checkpoint.generate(prompt, GREEDY.max_tokens) for prompt in shared_prompts()]


@pytest.fixture(scope="module")
def shared_llm(checkpoint: Checkpoint) -> LLM:
    return make_llm(checkpoint)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The module's engine; the books must balance after every test."""
    yield shared_llm
    assert_idle(shared_llm)


def test_a_stream_shows_every_token_and_accumulates(llm: LLM, answers: list[Tokens]) -> None:
    shown = list(llm.generate(shared_prompts()[0], GREEDY, stream=True))
    assert_grows(shown, answers[0])
    assert [len(output.outputs[0].token_ids) for output in shown] == list(range(1, 47))
    assert (shown[-1].outputs[0].finish_reason, shown[-1].prompt) == ("length", None)
    metrics = shown[-1].metrics
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.preemptions) == (20, 46, 0)
    assert 0 < metrics.ttft_s < metrics.latency_s


def test_a_batch_streams_each_request_to_its_own_end(llm: LLM, answers: list[Tokens]) -> None:
    params = [replace(GREEDY, max_tokens=8 + 6 * i) for i in range(6)]
    shown: dict[str, list[RequestOutput]] = {}
    for output in llm.generate(shared_prompts(), params, stream=True):
        shown.setdefault(output.request_id, []).append(output)
    assert len(shown) == 6
    for snapshots, each, answer in zip(shown.values(), params, answers, strict=True):
        assert_grows(snapshots, answer)
        assert snapshots[-1].outputs[0].token_ids == answer[: each.max_tokens]


@pytest.mark.parametrize("taken", [0, 1, 9])
def test_leaving_a_stream_early_aborts_the_rest(llm: LLM, taken: int) -> None:
    stream = llm.generate(shared_prompts(), GREEDY, stream=True)
    for _ in range(taken):
        next(stream)
    assert llm.engine.has_work
    del stream
    assert not llm.engine._trackers
    assert_idle(llm)


@pytest.mark.parametrize("taken", [0, 9])
def test_a_stopped_stream_ends_with_what_each_request_has(
    llm: LLM, answers: list[Tokens], taken: int
) -> None:
    stream = llm.generate(shared_prompts(), GREEDY, stream=True)
    shown = [next(stream) for _ in range(taken)]
    stream.stop()
    last = {each.request_id: each for each in stream}
    told = {tuple(ids): answer for ids, answer in zip(shared_prompts(), answers, strict=True)}
    assert {each.prompt_token_ids for each in last.values()} == told.keys()
    for output in last.values():
        ids, answer = output.outputs[0].token_ids, told[output.prompt_token_ids]
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        assert ids == answer[: len(ids)]
    assert sum(len(each.outputs[0].token_ids) for each in last.values()) >= len(shown)
    assert_idle(llm)


def test_breaking_out_of_a_stream_aborts_the_rest(llm: LLM) -> None:
    for output in llm.generate(shared_prompts(), GREEDY, stream=True):
        if len(output.outputs[0].token_ids) == 5:
            break
    assert not llm.engine._trackers


def test_an_interrupt_inside_a_turn_aborts_at_once(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the caller holds on to the stream."""
    stream = llm.generate(shared_prompts(), GREEDY, stream=True)
    next(stream)
    original = llm.engine.step
    turns = iter([original, original, None])

    def step():
        turn = next(turns)
        if turn is None:
            raise KeyboardInterrupt
        return turn()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert not llm.engine._trackers
    assert list(stream) == []


def test_a_closed_stream_is_over(llm: LLM) -> None:
    with closing(llm.generate(shared_prompts(), GREEDY, stream=True)) as stream:
        next(stream)
    assert list(stream) == []
    assert not llm.engine._trackers


def test_an_aborted_request_shows_a_last_snapshot(llm: LLM, answers: list[Tokens]) -> None:
    """Its neighbour, with which it shares pages, goes on."""
    prompts = shared_prompts()
    llm.generate(prompts[4], replace(GREEDY, max_tokens=1))  # 64 tokens both will share
    stream = llm.generate(prompts[4:], GREEDY, stream=True)
    first = next(stream)
    shown = {first.request_id: [first]}
    for output in stream:
        shown.setdefault(output.request_id, []).append(output)
        cache = llm.engine.scheduler._cache
        if output is not first and len(shown[first.request_id]) == 7 and not output.finished:
            if first.request_id in cache._entries:
                assert num_shared_pages(cache, first.request_id) == 4
            llm.abort(first.request_id)
    aborted, other = shown.values()
    assert [o.outputs[0].finish_reason for o in aborted] == [None] * (len(aborted) - 1) + ["abort"]
    assert aborted[-1].outputs[0].token_ids == answers[4][: len(aborted[-1].outputs[0].token_ids)]
    assert_grows(other, answers[5])
    assert other[-1].outputs[0].token_ids == answers[5]
    assert not llm.abort(first.request_id)
    assert not llm.abort("nobody")


@pytest.mark.parametrize("turns", range(0, 12, 2))
def test_an_abort_at_any_turn_leaks_nothing(checkpoint: Checkpoint, turns: int) -> None:
    """While it waits, prefills in chunks, decodes, or is preempted; its pages serve the others."""
    prompts, options = shared_prompts(), {"chunked_prefill_size": 7, "page_size": 4}
    alone = [checkpoint.generate(prompt, 12) for prompt in prompts]
    knobs = Knobs(num_pages=(36,), admission_margin=0)
    with make_llm(checkpoint, knobs=knobs, max_num_seqs=4, **options) as llm:
        for victim in range(6):
            stream = llm.generate(prompts, replace(GREEDY, max_tokens=12), stream=True)
            names = list(llm.engine._trackers)
            for _ in range(turns):
                llm.engine.step()
            llm.abort(names[victim])
            last = {output.request_id: output.outputs[0] for output in stream}
            for index, name in enumerate(names):
                ids = last[name].token_ids
                assert ids == alone[index][: len(ids)]
                wanted = "abort" if index == victim else "length"
                assert last[name].finish_reason == wanted or len(ids) == 12
            assert_idle(llm)


def test_more_requests_than_rows_all_get_their_answer(checkpoint: Checkpoint) -> None:
    prompts = random_prompts([5 + i % 9 for i in range(40)], seed=6)
    params = [replace(GREEDY, max_tokens=1 + i % 13) for i in range(40)]
    with make_llm(checkpoint, max_num_seqs=3, page_size=4) as llm:
        found = tokens_of(llm.generate(prompts, params))
        assert_idle(llm)
    for prompt, each, ids in zip(prompts, params, found, strict=True):
        assert ids == checkpoint.generate(prompt, each.max_tokens)


def test_interleaved_streams_do_not_disturb_each_other(llm: LLM, answers: list[Tokens]) -> None:
    prompts = shared_prompts()
    one = llm.generate(prompts[:2], GREEDY, stream=True)
    shown = [next(one)]
    two = llm.generate(prompts[2:4], GREEDY, stream=True)
    rest = [next(two)]
    between = llm.generate(prompts[4:], GREEDY)  # runs to its end; the others run beside it
    shown += list(one)
    rest += list(two)
    assert tokens_of(between) == answers[4:]
    for snapshots, base in ((shown, 0), (rest, 2)):
        names = sorted({output.request_id for output in snapshots}, key=len)
        assert len(names) == 2
        for index, name in enumerate(sorted(names, key=lambda n: int(n.split("-")[1]))):
            mine = [output for output in snapshots if output.request_id == name]
            assert_grows(mine, answers[base + index])
            assert mine[-1].outputs[0].token_ids == answers[base + index]


def test_closing_ends_streams_with_a_last_snapshot(
    checkpoint: Checkpoint, answers: list[Tokens]
) -> None:
    llm = make_llm(checkpoint)
    stream = llm.generate(shared_prompts()[:2], GREEDY, stream=True)
    next(stream)
    llm.close()
    llm.close()
    rest = list(stream)
    assert len(rest) <= 3
    assert [output.outputs[0].finish_reason for output in rest[-2:]] == ["abort", "abort"]
    for name in ("generate", "abort"):
        with pytest.raises(PacelineError, match="LLM must be open, got closed; build a new one"):
            getattr(llm, name)("x")


def test_a_prompt_that_is_aborted_while_a_batch_runs_is_told_in_its_place(
    llm: LLM, answers: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn brings its end."""
    launch, names = llm._live.runner.launch, list[str]()

    def interrupt(step: Step) -> LaunchedStep:
        if not names:
            names.append(list(llm.engine._trackers)[1])
            assert llm.abort(names[0])
        return launch(step)

    monkeypatch.setattr(llm._live.runner, "launch", interrupt)
    found = llm.generate(shared_prompts()[:3], GREEDY)
    assert [each.outputs[0].finish_reason for each in found] == ["length", "abort", "length"]
    assert found[1].request_id == names[0]
    assert [tokens_of([found[i]]) for i in (0, 2)] == [[answers[i]] for i in (0, 2)]


def test_text_and_token_ids_of_one_prompt_agree(llm: LLM, answers: list[Tokens]) -> None:
    ids = shared_prompts()[0]
    [output] = llm.generate(
        text_of(ids), {"temperature": 0, "max_new_tokens": 46} | {"ignore_eos": True}
    )
    assert (output.prompt, output.prompt_token_ids) == (text_of(ids), tuple(ids))
    assert output.outputs[0].token_ids == answers[0]
    assert output.outputs[0].text == text_of(answers[0])


def test_report_and_tables_tell_what_was_booted(llm: LLM) -> None:
    report = llm.report()
    assert report["attention"]["name"] == "torch"
    assert report["options"]["page_size"] == {
        "value": 16,
        "origin": "chosen: short page tables, little waste",
    }
    assert "page-size" in llm.resolution_table
    assert "weights" in llm.memory_table()


def test_sampling_defaults_generate(llm: LLM) -> None:
    [output] = llm.generate(shared_prompts()[0])
    assert 1 <= len(output.outputs[0].token_ids) <= SamplingParams().max_tokens
