"""The engine's thread: it sleeps when idle, ends in order, and tells everybody when it fails."""

import asyncio
import queue
from itertools import pairwise

import httpx
import pytest
from serving import serving, small_llm, wait_until

from paceline.core.errors import PacelineError, RequestError
from paceline.core.sampling_params import SamplingParams
from paceline.server.async_engine import AsyncEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def run(scene, *, llm=None, commands=None):
    """A coroutine function of (engine, llm), with the engine started and stopped around it."""
    llm = llm or small_llm()

    async def play():
        engine = AsyncEngine(llm)
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
        return sorted([each async for each in await engine.generate(prompts, GREEDY, stream=False)])

    llm = small_llm()
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    answers = run(scene, llm=llm)
    assert [(index, output.outputs[0].token_ids) for index, output in answers] == [
        *enumerate(expected)
    ]


def test_growth_is_shown_only_to_those_who_want_it():
    async def scene(engine, llm):
        counts = []
        for stream in (False, True):
            ticket = await engine.generate([[5, 6]], GREEDY, stream=stream)
            counts.append(len([each async for each in ticket]))
        return counts

    whole, streamed = run(scene)
    assert whole == 1
    assert streamed > 2


def test_a_refused_request_leaves_no_trace_and_others_go_on():
    async def scene(engine, llm):
        other = await engine.generate([[5, 6]], GREEDY, stream=False)
        with pytest.raises(RequestError, match="prompt token id 1 must be an integer from 0 to"):
            await engine.generate([[5, -1]], GREEDY, stream=False)
        assert engine.num_tickets == 1
        assert [output.finished async for _, output in other] == [True]
        assert engine.num_tickets == 0

    run(scene)


def test_an_idle_engine_does_not_spin():
    """Where no command is, it makes a turn or sleeps until there is one, before it looks again."""
    done = []

    class Noted(queue.SimpleQueue):
        def get(self):  # for as long as it takes
            done.append("sleep")
            return super().get()

        def get_nowait(self):
            try:
                return super().get_nowait()
            except queue.Empty:
                done.append("nothing")
                raise

    async def scene(engine, llm):
        for _ in range(2):
            ticket = await engine.generate([[5, 6]], GREEDY, stream=False)
            assert [output.finished async for _, output in ticket] == [True]

    llm = small_llm()
    step = llm.engine.step
    llm.engine.step = lambda: done.append("turn") or step()
    run(scene, llm=llm, commands=Noted())
    assert {"sleep", "turn", "nothing"} == set(done)
    assert ("nothing", "nothing") not in pairwise(done)


def test_cancelling_while_waiting_for_acceptance_leaves_nothing():
    async def scene(engine, llm):
        task = asyncio.ensure_future(engine.generate([[5, 6]], ENDLESS, stream=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.num_tickets or llm.engine.has_work or engine._running:
            await asyncio.sleep(0.01)

    run(scene)


def test_stopping_ends_what_runs_with_a_last_snapshot():
    async def scene(engine, llm):
        ticket = await engine.generate([[5, 6]], ENDLESS, stream=False)
        await engine.stop()
        outputs = [output async for _, output in ticket]
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
        assert not llm.engine.has_work
        with pytest.raises(PacelineError, match="the engine must be running, got stopped; start"):
            await engine.generate([[5]], GREEDY, stream=False)

    run(scene)


def test_a_failed_engine_answers_500_to_all_and_503_to_health(caplog):
    llm = small_llm()
    turn, is_broken = llm.engine._turn, []

    def break_later(*values):
        if is_broken:
            raise RuntimeError("the device is gone")
        return turn(*values)

    llm.engine._turn = break_later
    body = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True}
    with serving(llm) as server, httpx.Client(base_url=server.url, timeout=None) as client:
        assert client.get("/health").status_code == 200
        with client.stream("POST", "/v1/completions", json=dict(body, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            is_broken.append(True)
            last = [line for line in lines if line][-1]
        assert "ended by RuntimeError('the device is gone')" in last
        assert '"type":"server_error"' in last
        wait_until(lambda: server.engine.failure is not None)
        for stream in (False, True):
            answer = client.post("/v1/completions", json=dict(body, stream=stream))
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "the engine must be running, got ended by" in answer.json()["error"]["message"]
        health = client.get("/health")
        assert health.status_code == 503
        assert "the device is gone" in health.json()["error"]["message"]
    (record,) = [each for each in caplog.records if each.name == "paceline" and each.exc_info]
    assert "the engine has failed" in record.message
