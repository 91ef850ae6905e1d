"""A client that leaves: its request ends at once, others go on, and the books return to zero."""

import http.client
import json
import threading

import httpx
import openai
import pytest
from serving import FIRST_WORDS, serving, small_llm, wait_until

LONG = {
    "model": "tiny",
    "prompt": "def f(x):",
    "temperature": 0,
    "max_tokens": 200,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server():
    with serving(small_llm()) as world:
        yield world


@pytest.fixture
def trackers(server, monkeypatch):
    """Every request the engine takes in; it is held behind their first words."""
    taken = []
    monkeypatch.setattr(
        server.llm, "enqueue", lambda admitted: taken.extend(found := enqueue(admitted)) or found
    )
    enqueue = type(server.llm).enqueue.__get__(server.llm)
    server.turns.hold(after=FIRST_WORDS)
    yield taken
    server.turns.go()
    wait_until(server.is_idle)


def go_on(server, *, callers=0):
    """Once the server has seen who left."""
    wait_until(lambda: len(server.engine.callers) == callers)
    server.turns.go()
    wait_until(server.is_idle)


def only(trackers):
    (tracker,) = trackers
    return tracker.snapshot().outputs[0]


def test_leaving_a_stream_ends_the_request(server, trackers):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        asked = {name: value for name, value in LONG.items() if name != "ignore_eos"}
        stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    go_on(server)
    assert only(trackers).finish_reason == "abort"
    assert 0 < len(only(trackers).token_ids) < LONG["max_tokens"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_leaving_before_a_whole_answer_ends_the_request(server, trackers, path):
    body = dict(LONG)
    if path == "chat/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v1/{path}", json.dumps(body), headers)
    wait_until(lambda: bool(trackers) and trackers[0].num_tokens > 0)
    connection.close()
    go_on(server)
    assert only(trackers).finish_reason == "abort"


def test_others_go_on_when_one_leaves(server, trackers):
    short = dict(LONG, stream=True, max_tokens=20)
    with (
        httpx.Client(base_url=server.url, timeout=None) as client,
        client.stream("POST", "/v1/completions", json=dict(LONG, stream=True)) as left,
        client.stream("POST", "/v1/completions", json=short) as stayed,
    ):
        next(left.iter_lines())
        server.turns.hold(after=FIRST_WORDS)
        lines = stayed.iter_lines()
        next(lines)
        left.close()
        go_on(server, callers=1)
        assert list(lines)[-2] == "data: [DONE]"
    assert trackers[1].snapshot().outputs[0].finish_reason == "length"
    assert trackers[0].snapshot().outputs[0].finish_reason == "abort"


def test_a_slow_reader_gets_the_whole_text(server):
    """Pieces that wait for the reader are joined, not dropped."""
    asked, has_ended = dict(LONG, max_tokens=60), threading.Event()
    with httpx.Client(base_url=server.url, timeout=None) as client:
        whole = client.post("/v1/completions", json=asked).json()
        server.turns.hold(after=FIRST_WORDS)
        with client.stream("POST", "/v1/completions", json=dict(asked, stream=True)) as stream:
            lines = stream.iter_lines()
            data = [next(lines)]
            server.loop.call_soon_threadsafe(has_ended.wait)
            server.turns.go()
            wait_until(lambda: not server.llm.engine.has_work)
            has_ended.set()
            data = [line[6:] for line in (*data, *lines) if line]
    text = "".join(json.loads(each)["choices"][0]["text"] for each in data[:-1])
    assert text == whole["choices"][0]["text"]
    assert len(data) < 2 + FIRST_WORDS
