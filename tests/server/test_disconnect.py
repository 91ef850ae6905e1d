"""A client that leaves: its request ends at once, others go on, and the books return to zero."""

import http.client
import json
import time

import httpx
import openai
import pytest
from serving import serving, small_llm, wait_until

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
    """Every request the engine takes in, in slow motion: none of them ends by itself."""
    taken = []
    engine = server.llm.engine
    step = engine.step
    monkeypatch.setattr(
        server.llm, "submit", lambda *asked: taken.extend(found := submit(*asked)) or found
    )
    submit = type(server.llm).submit.__get__(server.llm)
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
    yield taken
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
    wait_until(server.is_idle)
    assert only(trackers).finish_reason == "abort"
    assert 0 < len(only(trackers).token_ids) < 150


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
    wait_until(server.is_idle)
    assert only(trackers).finish_reason == "abort"


def test_others_go_on_when_one_leaves(server, trackers):
    short = dict(LONG, stream=True, max_tokens=20)
    with (
        httpx.Client(base_url=server.url, timeout=30) as client,
        client.stream("POST", "/v1/completions", json=dict(LONG, stream=True)) as left,
        client.stream("POST", "/v1/completions", json=short) as stayed,
    ):
        next(left.iter_lines())
        lines = stayed.iter_lines()
        next(lines)
        left.close()
        assert list(lines)[-2] == "data: [DONE]"
    assert trackers[1].snapshot().outputs[0].finish_reason == "length"
    wait_until(server.is_idle)
    assert trackers[0].snapshot().outputs[0].finish_reason == "abort"


def test_a_slow_reader_gets_the_whole_text(server):
    """Pieces that wait for the reader are joined, not dropped."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        whole = client.post("/v1/completions", json=dict(LONG, max_tokens=60)).json()
        with client.stream(
            "POST", "/v1/completions", json=dict(LONG, max_tokens=60, stream=True)
        ) as stream:
            time.sleep(0.5)
            data = [line[6:] for line in stream.iter_lines() if line]
    text = "".join(json.loads(each)["choices"][0]["text"] for each in data[:-1])
    assert text == whole["choices"][0]["text"]
