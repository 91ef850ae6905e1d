"""The engine's thread: it sleeps when idle, ends in order, and tells everybody when it fails."""

import asyncio
import queue
from itertools import pairwise

import pytest

from paceline.core.errors import BusyError, CapacityError, PacelineError, RequestError
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.async_engine import AsyncEngine
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def small_llm():
    """In float32, where greedy answers have no ties; its pages hold 48 tokens."""
    return LLM(
        "bundled",
        dtype="float32",
        threads=1,
        max_num_seqs=4,
        max_model_len=64,
        enforce_eager=True,
        knobs=Knobs(num_pages=(4,)),
        page_size=16,
        speculative_algorithm="off",
    )


def ask(engine, llm, prompts, params, *, stream=False):
    """Awaits the ticket of prompts that are admitted first."""
    return engine.generate(llm.admission.admit(prompts, params), stream=stream)


def run(scene, *, llm=None, commands=None, **more):
    """A coroutine function of (engine, llm), with the engine started and stopped around it."""
    llm = llm or small_llm()

    async def play():
        engine = AsyncEngine(llm, **more)
        engine._commands = commands or engine._commands
        engine.start()
        try:
            return await scene(engine, llm)
        finally:
            await engine.stop()

    try:
        return asyncio.run(play())
    finally:
        llm.close()


def test_answers_are_those_of_generate():
    prompts = [[5, 6, 7], [8, 9]]

    async def scene(engine, llm):
        return sorted(
            [each async for each in await ask(engine, llm, prompts, GREEDY, stream=False)]
        )

    llm = small_llm()
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    answers = run(scene, llm=llm)
    assert [(index, output.outputs[0].token_ids) for index, output in answers] == [
        *enumerate(expected)
    ]


def test_what_grows_is_shown_only_to_those_who_want_it():
    async def scene(engine, llm):
        counts = []
        for stream in (False, True):
            ticket = await ask(engine, llm, [[5, 6]], GREEDY, stream=stream)
            counts.append(len([each async for each in ticket]))
        return counts

    whole, streamed = run(scene)
    assert whole == 1
    assert streamed > 2


def test_a_refused_request_leaves_no_trace_and_others_go_on():
    async def scene(engine, llm):
        other = await ask(engine, llm, [[5, 6]], GREEDY)
        with pytest.raises(CapacityError, match=r"^prompt\[1\]: "):
            await ask(engine, llm, [[5], [5] * 50], GREEDY)
        assert len(engine.callers) == 1
        assert [output.finished async for _, output in other] == [True]
        assert len(engine.callers) == 0

    run(scene)


def test_an_idle_engine_does_not_spin():
    """Where no command is, it makes a turn or sleeps until there is one, before it looks again."""
    done = []

    class Noted(queue.SimpleQueue):
        def get(self, timeout=None):
            done.append("sleep")
            return super().get(timeout=timeout)

        def get_nowait(self):
            try:
                return super().get_nowait()
            except queue.Empty:
                done.append("nothing")
                raise

    async def scene(engine, llm):
        for _ in range(2):
            ticket = await ask(engine, llm, [[5, 6]], GREEDY)
            assert [output.finished async for _, output in ticket] == [True]

    llm = small_llm()
    step = llm.engine.step
    llm.engine.step = lambda: done.append("turn") or step()
    run(scene, llm=llm, commands=Noted())
    assert {"sleep", "turn", "nothing"} == set(done)
    assert ("nothing", "nothing") not in pairwise(done)


def test_cancelling_while_waiting_for_acceptance_leaves_nothing():
    async def scene(engine, llm):
        task = asyncio.ensure_future(ask(engine, llm, [[5, 6]], LONG, stream=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while len(engine.callers) or llm.engine.has_work or len(engine._followed):
            await asyncio.sleep(0.01)

    run(scene)


def test_snapshots_that_wait_for_a_reader_give_way_to_the_newest():
    async def scene(engine, llm):
        admitted = llm.admission.admit([[5, 6]], GREEDY)
        ticket = await engine.generate(admitted, stream=True)
        while not ticket.is_complete:
            await asyncio.sleep(0.01)
        return [len(output.outputs[0].token_ids) async for _, output in ticket]

    assert run(scene) == [8]


def test_a_full_queue_is_told_from_what_never_fits_it():
    async def scene(engine, llm):
        with pytest.raises(RequestError, match="n must be at most 6 completions at once, of all"):
            await ask(engine, llm, [[5]] * 7, LONG)
        ticket = await ask(engine, llm, [[5]] * 5, LONG)
        with pytest.raises(BusyError, match="the queue must be at most 6 completions, running"):
            await ask(engine, llm, [[5]] * 2, GREEDY)
        ticket.close()
        await ask(engine, llm, [[5]] * 6, GREEDY)

    run(scene, max_queued=2)


def test_stopping_ends_what_runs_with_a_last_snapshot():
    async def scene(engine, llm):
        ticket = await ask(engine, llm, [[5, 6]], LONG)
        await engine.stop()
        outputs = [output async for _, output in ticket]
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
        assert not llm.engine.has_work
        with pytest.raises(PacelineError, match="the engine must be running, got stopped; start"):
            await ask(engine, llm, [[5]], GREEDY)

    run(scene)
