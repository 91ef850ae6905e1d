"""`paceline serve` as a process: what it prints, how it answers, how it ends."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import PIPE
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from serving import FIRST_WORDS, Hosted, Turns, small_llm

from children import PACELINE, child
from paceline.cli.app import app
from paceline.cli.lines import Lines
from paceline.core.errors import ConfigError
from paceline.core.modes import End
from paceline.server import run
from paceline.server.bodies.wire import CompletionRequest
from paceline.server.border import process
from paceline.server.border.live_forms import FormLimits
from paceline.server.border.messages import NO_VECTORS, Vectors
from paceline.server.limits import ServerLimits
from paceline.server.run import Address, banner, bind, serve
from paceline.server.tools.formats import UNKNOWN
from paceline.server.vectors.wire import EmbeddingsRequest, ScoreRequest

COMMAND = [*PACELINE, "serve", "--port", "0", "--threads", "1", "--enforce-eager"]
BODY = {"model": "bundled", "prompt": "x", "temperature": 0, "ignore_eos": True, "stream": True}


def address_in(lines):
    """Where the server is, once it says so."""
    read = []
    for line in lines:
        read.append(line)
        found = re.search(r"^serving \S+ on (http://\S+)/v1, Ctrl-C stops$", line, re.MULTILINE)
        if found:
            return found[1]
    raise AssertionError("".join(read))


def served(peer, ask, tell, *, log=None, **limits):
    """(what `serve` returns, what `ask` does with its address), which runs beside and ends it."""
    address = Address(
        host="127.0.0.1", port=0, model="tiny", limits=ServerLimits(**limits), log=log
    )
    with bind(address) as bound, ThreadPoolExecutor(1) as client:
        asked = client.submit(ask, f"http://127.0.0.1:{bound.getsockname()[1]}")
        failure = serve(peer, bound, address, tell=tell)
        answer = asked.result()
    peer.host.llm.close()
    return failure, answer


def at_first_request(llm, happens):
    """In the first turn that has one."""
    step = llm.engine.step
    llm.engine.step = lambda: (not llm.engine._trackers or happens()) and step()


def stop():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def assert_turned_away(url):
    """A server that stops listens, and says so."""
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").json()["error"]["code"] == "stopping"
    refused = httpx.post(f"{url}/v1/completions", json=dict(BODY, model="tiny"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    text = "the server must be running, got stopping; send it to another, or again later"
    assert refused.json()["error"]["message"] == text


def test_ctrl_c_lets_running_requests_end_and_says_so():
    llm, told = small_llm(speculative_algorithm="off"), queue.SimpleQueue()
    turns = Turns(llm)
    turns.hold(after=FIRST_WORDS)

    def ask(_):
        url, body = address_in(iter(told.get, None)), dict(BODY, model="tiny", max_tokens=20)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as stream:
            lines = stream.iter_lines()
            next(lines)
            stop()
            said = told.get()
            assert_turned_away(url)
            turns.go()
            return said, list(lines)

    failure, (said, lines) = served(Hosted(llm), ask, told.put)
    assert failure is None
    assert said == "finishing 1 request(s), at most 20 s; Ctrl-C: at once"
    assert '"finish_reason":"length"' in lines[-4]
    assert lines[-2] == "data: [DONE]"


def test_what_does_not_end_in_the_seconds_of_the_drain_is_ended():
    llm, told = small_llm(speculative_algorithm="off"), queue.SimpleQueue()
    turns = Turns(llm)
    turns.hold(after=FIRST_WORDS)

    def ask(_):
        url, body = address_in(iter(told.get, None)), dict(BODY, model="tiny", max_tokens=20)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None) as stream:
            lines = stream.iter_lines()
            next(lines)
            stop()
            last = [line for line in lines if line][-1]
            turns.go()
            return last

    failure, last = served(Hosted(llm), ask, told.put, drain_s=0.1)
    assert failure is None
    assert "the server stops before this answer was whole; send it again" in last


def test_a_server_that_cannot_end_is_left(monkeypatch):
    """Its engine hangs in a turn, and hears nothing."""
    llm, told, left = small_llm(speculative_algorithm="off"), queue.SimpleQueue(), threading.Event()
    codes = []
    monkeypatch.setattr(run, "_FAREWELL_S", 0.1)
    monkeypatch.setattr(run, "_GRACE_S", 0.1)
    monkeypatch.setattr(run, "leave", lambda code: (codes.append(code), left.set()))
    at_first_request(llm, left.wait)

    def ask(_):
        url, body = address_in(iter(told.get, None)), dict(BODY, model="tiny", max_tokens=20)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=None):
            stop()
            left.wait()

    peer = Hosted(llm)
    served(peer, ask, told.put, drain_s=0.1)
    assert codes == [run.STUCK]
    assert peer.num_kills == 1


def test_an_engine_that_fails_ends_the_server_with_an_error():
    llm, told = small_llm(speculative_algorithm="off"), queue.SimpleQueue()
    at_first_request(llm, lambda: 1 // 0)

    def ask(_):
        url, body = address_in(iter(told.get, None)), dict(BODY, model="tiny")
        return httpx.post(f"{url}/v1/completions", json=body, timeout=None).text

    failure, answer = served(Hosted(llm), ask, told.put)
    assert "ended by ZeroDivisionError" in answer
    assert failure.startswith("the engine must be running, got ended by ZeroDivisionError")


def test_a_stderr_that_nobody_reads_does_not_stop_a_drain():
    """Nor what is said meanwhile; a pipe holds 64 KiB."""
    llm, told = small_llm(speculative_algorithm="off"), queue.SimpleQueue()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while os.write(write_end, b"x" * 4096):
            pass
    os.set_blocking(write_end, True)
    lines = Lines(write_end)
    for _ in range(2_000):
        lines.write("again and again\n")
    assert lines.num_dropped > 900

    def ask(_):
        address_in(iter(told.get, None))
        stop()

    failure, _ = served(Hosted(llm), ask, lambda text: (lines.write(text), told.put(text)))
    assert failure is None
    os.close(read_end)
    lines.close()
    os.close(write_end)


def test_a_stderr_that_is_gone_drops_what_is_said():
    read_end, write_end = os.pipe()
    os.close(read_end)
    lines = Lines(write_end)
    lines.write("nobody hears this\n")
    lines.close()
    os.close(write_end)
    assert lines.num_dropped == 1


@pytest.mark.parametrize("tokenizer", [None, "one"])
@pytest.mark.parametrize(
    ("ends", "vectors", "path", "kind"),
    [
        ((End.GENERATE, End.SCORE), NO_VECTORS, "completions", CompletionRequest),
        ((End.POOL,), Vectors(width=8, normalizes=True), "embeddings", EmbeddingsRequest),
        ((End.POOL,), Vectors(width=1, normalizes=True, label_act="s"), "score", ScoreRequest),
        ((End.POOL,), Vectors(width=3, normalizes=True, label_act="s"), None, None),
    ],
)
def test_what_a_server_teaches_is_what_its_model_answers(ends, vectors, path, kind, tokenizer):
    reader = SimpleNamespace(formats=UNKNOWN, tokenizer=tokenizer)
    service = SimpleNamespace(model="m", ends=ends, vectors=vectors, reader=reader)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        told = banner(service, bound)
    if path is None or (path == "score" and tokenizer is None):
        assert "curl" not in told
        return
    url, body = re.search(r"curl (\S+) .* -d '(.*)'$", told).groups()
    assert url.endswith(f"/v1/{path}")
    asked = msgspec.json.decode(body, type=kind)
    assert asked.model == "m"
    if path != "score":
        text = asked.prompt if path == "completions" else asked.input
        assert isinstance(text, str) == (tokenizer is not None)


def test_a_second_ctrl_c_does_not_wait():
    """Whole as a process: what it prints, the request it teaches, an end without a trace."""
    with child([*COMMAND, "--api-key", "sesame"], stderr=PIPE, text=True) as process:
        url, curl = address_in(process.stderr), process.stderr.readline()
        assert curl.startswith(f"  curl {url}/v1/completions -H 'Authorization: Bearer '$PACELINE")
        assert httpx.get(f"{url}/v1/models", timeout=None).status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        with httpx.Client(base_url=url, headers=headers, timeout=None) as client:
            taught = json.loads(curl.partition(" -d '")[2].strip().rstrip("'"))
            assert client.post("/v1/completions", json=taught).json()["choices"][0]["text"]
            asked = dict(BODY, max_tokens=2000)
            with client.stream("POST", "/v1/completions", json=asked) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                assert process.stderr.readline().startswith("finishing 1 request(s)")
                process.send_signal(signal.SIGINT)
                last = [line for line in lines if line][-1]
        text = process.stderr.read()
    assert process.returncode == 0
    assert text == "stopped\n"
    assert "the server stops before this answer was whole; send it again" in last


def test_a_port_in_use_is_one_line_before_anything_is_loaded(monkeypatch):
    monkeypatch.delattr(subprocess, "Popen")  # of an engine
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ConfigError: --host and --port must be an address that is free here")
    assert f"got 127.0.0.1:{port} ([Errno 98]" in line
    assert line.endswith("choose another port, or 0 for any that is free")


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_format_that_is_none_is_one_line_before_anything_is_loaded(monkeypatch, flag):
    monkeypatch.delattr(subprocess, "Popen")
    done = CliRunner().invoke(app, ["serve", "--port", "0", flag, "hermse"])
    assert done.exit_code == 2
    assert f"{flag} must be one of auto, none, " in done.stderr


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid"])
def test_a_host_that_is_none_is_one_line(host):
    done = CliRunner().invoke(app, ["serve", "--host", host, "--api-key", "secret"])
    assert done.exit_code == 2
    assert f"got {host}:8000 (" in done.stderr


def test_every_interface_asks_for_a_key():
    done = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0"])
    assert done.exit_code == 2
    assert "--host must be a loopback address while no key is asked for" in done.stderr


def test_help_teaches_by_examples():
    text = CliRunner().invoke(app, ["serve", "--help"]).stdout
    for part in ("--served-model-name", "PACELINE_API_KEY", "curl http://", "OpenAI(base_url="):
        assert part in text


@pytest.mark.parametrize("more", [(9, 3), ()])
def test_limits_of_forms_go_to_the_engine(monkeypatch, more):
    heard = []

    def start(options, **setup):
        heard.append((setup["max_forms"], setup["max_forms_per_client"]))
        raise ConfigError("no engine")

    monkeypatch.setattr(process, "EngineProcess", start)
    flags = ("--max-forms", "--max-forms-per-client")
    words = [str(word) for pair in zip(flags, more, strict=False) for word in pair]
    done = CliRunner().invoke(app, ["serve", "--port", "0", *words])
    assert "no engine" in done.output
    usual, limits = FormLimits(), ServerLimits()
    assert (limits.max_forms, limits.max_forms_per_client) == (usual.of_all, usual.of_client)
    assert heard == [more or (usual.of_all, usual.of_client)]
