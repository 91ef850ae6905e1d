"""What a long answer costs others: between its parts the event loop has a turn, or they are written
beside it."""

import asyncio
import threading

import httpx
import pytest
from scripted import TEMPLATES, scripted_service

from paceline.server.app import build_app
from paceline.server.completions import CompletionWriter
from paceline.server.logprobs import chat_logprobs

BODY = {"model": "tiny", "prompt": "x = 1", "max_tokens": 3}


def asked(service, body):
    """The answer, and how many turns others had had when each choice was written."""
    turns, seen = 0, []
    written = CompletionWriter.whole

    def noted(*args):
        seen.append(turns)
        return written(*args)

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def ask():
        beside = asyncio.ensure_future(others())
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.post("/v1/completions", json=body, timeout=None)
        beside.cancel()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompletionWriter, "whole", noted)
        return asyncio.run(ask()), seen


@pytest.fixture
def service():
    found = scripted_service(TEMPLATES["plain"])
    found.engine.texts = ["abc"]
    return found


def test_others_have_a_turn_between_two_choices(service):
    answer, turns = asked(service, BODY | {"n": 4})
    assert answer.status_code == 200
    assert len(turns) == len(set(turns)) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"trace_tokens": True}, {"echo": True, "logprobs": 1}], ids=str)
def test_tokens_of_prompts_are_named_beside_the_loop(service, monkeypatch, stream, more):
    threads = set()
    whole = CompletionWriter.whole
    monkeypatch.setattr(
        CompletionWriter,
        "whole",
        lambda *args: threads.add(threading.get_ident()) or whole(*args),
    )
    answer, _ = asked(service, BODY | more | {"stream": stream})
    assert answer.status_code == 200
    assert threading.get_ident() not in threads
    assert threads


def test_traces_name_at_most_one_context_of_prompts(service):
    most = service.reader.room.context_len
    prompts = [[5] * (most // 2), [5] * (most // 2 + 1)]
    assert asked(service, BODY | {"prompt": prompts})[0].status_code == 200
    body = BODY | {"prompt": prompts, "trace_tokens": True}
    answer, _ = asked(service, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "trace_tokens")
    expected = f"trace_tokens must be asked of prompts of at most {most} tokens together, the"
    assert error["message"].startswith(expected)
    assert f"got {most + 1}; trace fewer prompts in one request" in error["message"]


def test_what_is_no_log_probability_is_never_told_as_null(service):
    rows = [type("Row", (), {"chosen": float("nan"), "top_ids": (), "top_values": ()})()]
    with pytest.raises(AssertionError, match="nan is no log-probability"):
        chat_logprobs(service.names, [5], rows)
