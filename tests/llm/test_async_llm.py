"""AsyncLLM: one loop, many tasks, the answers of LLM."""

import asyncio
import gc
import itertools
import threading

import pytest

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.core.errors import BusyError, ConfigError, PacelineError, RequestError
from paceline.engine.engine import Engine
from paceline.llm.admission import NO_FORMS
from paceline.text.structured import StructureCompiler

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SMALL = {
    "dtype": "float32",  # greedy answers have no ties
    "threads": 1,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "enforce_eager": True,
    "speculative_algorithm": "off",
}
TEXTS = ("def add(a, b):", "class Stack:", "import os")
TALK = [{"role": "user", "content": "hello"}]


def run(scene, **more):
    """A coroutine function of a started AsyncLLM."""

    async def play():
        async with AsyncLLM("bundled", **SMALL, **more) as llm:
            return await scene(llm)

    return asyncio.run(play())


@pytest.fixture(scope="module")
def answers():
    """What LLM says to TEXTS."""
    with LLM("bundled", **SMALL) as llm:
        return [output.outputs[0] for output in llm.generate(TEXTS, GREEDY)]


def test_tasks_get_the_answers_of_llm_as_one_batch(answers):
    async def scene(llm):
        outputs = await asyncio.gather(*(llm.complete(text, GREEDY) for text in TEXTS))
        return [output.outputs[0] for output in outputs]

    assert run(scene) == answers


def test_forms_are_prepared_beside_the_loop_and_a_fault_of_them_is_an_event(monkeypatch):
    """A tokenizer that llguidance cannot read is no reason not to start."""
    threads = []

    def prepare(self):
        threads.append(threading.current_thread())
        return "cannot be read"

    monkeypatch.setattr(StructureCompiler, "prepare", prepare)

    async def scene(llm):
        with pytest.raises(RequestError, match=r"got regex \(cannot be read\)"):
            await llm.complete(TEXTS[0], SamplingParams(structured_outputs={"regex": "a"}))
        output = await llm.complete(TEXTS[0], GREEDY)
        return output.finished, llm.report()["events"]

    finished, events = run(scene)
    assert finished
    said = {event["reason"]: event["detail"] for event in events}
    assert said[NO_FORMS] == "answers have no asked-for form: cannot be read"
    assert threading.main_thread() not in threads


def test_graphs_are_made_ready_in_a_lull(monkeypatch):
    asked, done = [], threading.Event()

    def idle(self):
        asked.append(threading.current_thread())
        if len(asked) == 3:
            done.set()
        return len(asked) < 3

    monkeypatch.setattr(Engine, "idle", idle)
    monkeypatch.setattr("paceline.llm.async_engine.LULL_S", 0.01)

    async def scene(llm):
        await asyncio.to_thread(done.wait)
        return await llm.complete(TEXTS[0], GREEDY)

    assert run(scene).finished
    assert threading.main_thread() not in asked


def test_snapshots_grow_to_the_answer(answers):
    async def scene(llm):
        return [snapshot async for snapshot in llm.generate(TEXTS[0], GREEDY)]

    snapshots = run(scene)
    texts = [snapshot.outputs[0].text for snapshot in snapshots]
    assert len(texts) > 2
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert snapshots[-1].outputs[0] == answers[0]
    assert [snapshot.finished for snapshot in snapshots] == [*[False] * (len(texts) - 1), True]


def test_leaving_early_ends_the_request():
    async def scene(llm):
        engine = llm._live[0].engine
        snapshots = llm.generate([5, 6], ENDLESS)
        await anext(snapshots)
        await snapshots.aclose()
        async for _ in llm.generate([5, 6], ENDLESS):
            break  # dropped: the loop closes it
        gc.collect()
        while engine.has_work:
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(llm.complete([5, 6], ENDLESS))
        while not engine.has_work:
            await asyncio.sleep(0.01)
        waiting.cancel()
        while engine.has_work:
            await asyncio.sleep(0.01)

    run(scene)


def test_a_wrong_request_is_refused_and_others_go_on(answers):
    async def scene(llm):
        good = asyncio.ensure_future(llm.complete(TEXTS[0], GREEDY))
        while not llm._live[0].engine.has_work:
            await asyncio.sleep(0)
        with pytest.raises(BusyError, match="the queue must be at most 5 completions"):
            await llm.complete("x", SamplingParams(n=5))
        with pytest.raises(RequestError, match="prompt must be 1 to 63 tokens"):
            await llm.complete([5] * 64, GREEDY)
        with pytest.raises(RequestError, match="prompt must be one, got 2; ask for each in a task"):
            await anext(llm.generate(["a", "b"], GREEDY))
        with pytest.raises(RequestError, match="messages must be one, got 2; ask for each in a"):
            llm.chat([TALK, TALK])
        assert (await good).outputs[0] == answers[0]

    run(scene, max_queued_requests=1)


def test_options_are_checked_before_it_starts():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM("bundled", max_num_seqs=0)
    for wrong in (-1, "x", 1.5, True):
        with pytest.raises(ConfigError, match="max_queued_requests must be an integer of at leas"):
            AsyncLLM("bundled", max_queued_requests=wrong)
    llm = AsyncLLM("bundled", **SMALL)
    with pytest.raises(PacelineError, match="AsyncLLM must be started, got new or closed; start"):
        asyncio.run(llm.complete("x"))


def test_two_that_start_it_at_once_boot_it_once():
    async def play():
        llm = AsyncLLM("bundled", **SMALL)
        outcomes = await asyncio.gather(llm.start(), llm.start(), return_exceptions=True)
        await llm.close()
        return outcomes

    first, second = asyncio.run(play())
    assert first is None
    assert "AsyncLLM must be new, got started" in str(second)


def test_it_starts_once_and_closes_twice():
    async def scene(llm):
        with pytest.raises(PacelineError, match="AsyncLLM must be new, got started; start it once"):
            await llm.start()
        assert llm.report()["options"]["max_num_seqs"]["value"] == 4
        running = asyncio.ensure_future(llm.complete([5, 6], ENDLESS))
        while not llm._live[0].engine.has_work:
            await asyncio.sleep(0.01)
        await llm.close()
        await llm.close()
        assert (await running).outputs[0].finish_reason == "abort"

    run(scene)
