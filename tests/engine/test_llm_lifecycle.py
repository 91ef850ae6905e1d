"""The life of requests: streams, aborts, shared pages, queues, preemption, a closed LLM."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from llm_cases import (
    GREEDY,
    Checkpoint,
    Tokens,
    assert_idle,
    engine_of,
    make_checkpoint,
    make_head64_checkpoint,
    make_llm,
    random_prompts,
    recorded_steps,
    shared_prompts,
    text_of,
    tokens_of,
)

from paceline.core.errors import PacelineError
from paceline.core.modes import ForwardMode
from paceline.core.sampling_params import SamplingParams
from paceline.core.step import JoinDelta, PageDelta
from paceline.engine.boot import Knobs
from paceline.engine.llm import LLM
from paceline.engine.outputs import RequestOutput
from paceline.runner.buffers import StepBuffers
from paceline.runner.staging import StagingSlot


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return make_checkpoint("llama-gqa2-untied", tmp_path_factory.mktemp("llama"))


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


def assert_grows(shown: list[RequestOutput], answer: Tokens) -> None:
    """Snapshots of one request: each longer than the one before, all parts of the answer."""
    tokens = [output.outputs[0].token_ids for output in shown]
    lengths = [len(ids) for ids in tokens]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) >= len(lengths) - 1  # an end alone may add nothing
    assert [output.finished for output in shown] == [False] * (len(shown) - 1) + [True]
    for output, ids in zip(shown, tokens, strict=True):
        assert ids == answer[: len(ids)]
        assert output.outputs[0].text == text_of(ids)
        assert (output.metrics is not None) == output.finished


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
    assert engine_of(llm).has_work
    del stream
    assert not engine_of(llm)._trackers
    assert_idle(llm)


def test_breaking_out_of_a_stream_aborts_the_rest(llm: LLM) -> None:
    for output in llm.generate(shared_prompts(), GREEDY, stream=True):
        if len(output.outputs[0].token_ids) == 5:
            break
    assert not engine_of(llm)._trackers


def test_a_closed_stream_is_over(llm: LLM) -> None:
    with closing(llm.generate(shared_prompts(), GREEDY, stream=True)) as stream:
        next(stream)
    assert list(stream) == []
    assert not engine_of(llm)._trackers


def test_an_aborted_request_shows_a_last_snapshot(llm: LLM, answers: list[Tokens]) -> None:
    """Its neighbour, with which it shares pages, goes on."""
    prompts = shared_prompts()
    llm.generate(prompts[4], replace(GREEDY, max_tokens=1))  # 64 tokens both will share
    stream = llm.generate(prompts[4:], GREEDY, stream=True)
    first = next(stream)
    shown = {first.request_id: [first]}
    for output in stream:
        shown.setdefault(output.request_id, []).append(output)
        cache = engine_of(llm).scheduler._cache
        if output is not first and len(shown[first.request_id]) == 7 and not output.finished:
            if first.request_id in cache._entries:
                assert cache.num_shared_pages(first.request_id) == 4
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
            names = list(engine_of(llm)._trackers)
            for _ in range(turns):
                engine_of(llm).step()
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
            engine_of(llm).scheduler.check_integrity()
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
    """No page delta, no staged copy, no fill; a request reserves ahead once it outgrew its first
    pages, for 256 tokens."""
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
    assert sum(isinstance(delta, PageDelta) for delta in deltas) == 6
    steady = steps[50:200]
    assert all(step.deltas == () and step.mode is ForwardMode.DECODE for step in steady)


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
