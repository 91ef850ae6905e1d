"""What one client can ask for is bounded, and the others go on."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import httpx
import pytest
from serving import FIRST_WORDS, serving, small_llm, wait_until

from paceline.server.bodies.body import SMALL
from paceline.server.bodies.reader import Reader
from paceline.server.limits import LIMITS, ServerLimits

GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 2}
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}
MIB = 1 << 20
RUNNING = 16  # max_num_seqs of small_llm


@pytest.fixture(scope="module")
def server():
    with serving(small_llm(), limits=ServerLimits(max_queued=4, max_body_mib=1)) as world:
        yield world


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=None) as client:
        yield client
        server.turns.go()
        wait_until(server.is_idle)
        assert client.post("/v1/completions", json=GOOD).status_code == 200


def message_of(answer, status):
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]["message"]


def in_parts(body):
    """Without a length, so that it must be counted."""
    yield from (body[start : start + 65536] for start in range(0, len(body), 65536))


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_beyond_the_limit_is_answered_with_413(client, is_declared):
    padded = json.dumps(GOOD).encode().ljust(MIB)
    for body, status in ((padded, 200), (padded + b" ", 413)):
        content = body if is_declared else in_parts(body)
        answer = client.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == status
    got = f"{MIB + 1} bytes" if is_declared else "more"
    text = f"the body must be at most 1 MiB, got {got}; send less at once, or raise --max-body-mib"
    assert message_of(answer, 413).startswith(text)


def test_a_full_queue_is_answered_with_503_until_there_is_room(client, server):
    server.turns.hold(after=FIRST_WORDS)
    filling = LONG | {"n": RUNNING + 3, "stream": True, "seed": 1, "max_tokens": 20}
    with client.stream("POST", "/v1/completions", json=filling) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = client.post("/v1/completions", json=GOOD | {"n": 2})
        text = "the queue must be at most 20 completions, running and waiting, got 19 and 2 of this"
        assert message_of(refused, 503).startswith(text)
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        server.turns.go()
        assert client.post("/v1/completions", json=GOOD).status_code == 200
    wait_until(server.is_idle)
    assert client.post("/v1/completions", json=GOOD | {"n": 2}).status_code == 200


@pytest.mark.parametrize(
    "many", [{"n": 21}, {"prompt": ["x"] * 21}, {"prompt": ["x"] * 11, "n": 2}]
)
def test_what_never_fits_the_queue_is_a_400(client, many):
    text = message_of(client.post("/v1/completions", json=GOOD | many), 400)
    assert text.startswith("n must be at most 20 completions at once, of all prompts, got 2")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"min_tokens": 10**30}, "min_tokens must be an integer in 0..2147483647, got 1000"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias must be a mapping from token ids to num"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias must be a mapping from token ids to num"),
        ({"stop": "y" * 100_000}, "stop must be at most 1024 characters each, got 100000"),
        ({"stop": ["y"] * 33}, "stop must be at most 32 strings, got 33"),
        ({"stop": ["y" * 100_000, ""]}, "stop must be non-empty strings, got ['yyyyy"),
        ({"extra_args": {"a": 1}}, "a key of extra_args must be absent, got 'a'; load its"),
    ],
)
def test_values_out_of_all_bounds_are_refused_in_few_words(client, more, text):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | more
    found = message_of(client.post("/v1/chat/completions", json=body), 400)
    assert found.startswith(text)
    assert len(found) < 700


def only_x(text, **how):
    return {"x": [5]}[text]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(client, server, monkeypatch):
    text = "hello " * 100_000
    chat = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
    for path, body, param in (
        ("completions", GOOD | {"prompt": ["x", text]}, "prompt"),
        ("chat/completions", chat, "messages"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(server.tokenizer, "encode", only_x)
            answer = client.post(f"/v1/{path}", json=body)
        found = message_of(answer, 400)
        assert found.startswith(f"{param} must be within the context of 256 tokens, got at least ")
        assert answer.json()["error"]["param"] == param
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_prompts_beyond_the_queue_are_refused_before_they_are_tokenized(
    client, server, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.delattr(type(server.tokenizer), "encode")
        answer = client.post("/v1/completions", json=GOOD | {"prompt": ["x"] * 21})
    assert message_of(answer, 400).startswith("n must be at most 20 completions at once, of all")


def test_nothing_waits_for_the_process_that_reads_a_large_body(client, server):
    """It stands still meanwhile, which a thread could not without those beside it."""
    large = json.dumps(GOOD | {"prompt": "hello"}).encode().ljust(100_000)
    assert client.post("/v1/completions", content=large, headers=JSON).status_code == 200
    reads = server.worker._process.pid
    os.kill(reads, signal.SIGSTOP)
    server.turns.hold(after=FIRST_WORDS)
    with (
        ThreadPoolExecutor(1) as clients,
        client.stream(
            "POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 20}
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        waits = clients.submit(
            httpx.post, f"{server.url}/v1/completions", content=large, headers=JSON, timeout=None
        )
        wait_until(lambda: server.worker._thread._work_queue.empty() and not waits.done())
        server.turns.go()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert client.get("/health").status_code == 200
        assert not waits.done()
        os.kill(reads, signal.SIGCONT)
        assert waits.result().status_code == 200


def test_large_bodies_are_not_read_in_this_process(client, monkeypatch):
    monkeypatch.delattr(Reader, "read")
    large = json.dumps(GOOD).encode().ljust(100_000)
    assert client.post("/v1/completions", content=large, headers=JSON).status_code == 200
    monkeypatch.undo()


def test_what_may_take_longer_than_a_turn_of_the_loop_is_read_beside_it(client, monkeypatch):
    read, seen = Reader.read, []

    def noted(reader, endpoint, body):
        seen.append(threading.current_thread().name.startswith("asyncio_"))
        return read(reader, endpoint, body)

    monkeypatch.setattr(Reader, "read", noted)
    small = json.dumps(GOOD).encode()
    for body in (small, small.ljust(SMALL), small.ljust(SMALL + 1)):
        assert client.post("/v1/completions", content=body, headers=JSON).status_code == 200
    chat = {**GOOD, "messages": [{"role": "user", "content": "a"}]}
    del chat["prompt"]
    client.post("/v1/chat/completions", json=chat)  # whatever its template makes of it
    assert seen == [False, False, True, True]


def test_the_command_line_has_these_limits():
    from paceline.cli.serve import serve

    defaults = {option.name: option.default for option in serve.params}
    for name, default in asdict(LIMITS).items():
        stem, _, unit = name.rpartition("_")
        options = (
            [stem + "_timeout", stem + "_seconds"] if unit == "s" else [name, name + "_requests"]
        )
        assert [defaults[option] for option in options if option in defaults] == [default], name
