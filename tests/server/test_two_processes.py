"""HTTP and the engine as two processes: what each does when the other hangs or is gone."""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT

import httpx
import pytest
from serving import Hosted, serving, small_llm, wait_until
from test_serve_command import BODY, COMMAND, address_in, served, stop

from children import child
from paceline.core.errors import CapacityError
from paceline.server.border import engine_main, remote
from paceline.server.border.engine_main import place_of, progress_to
from paceline.server.border.messages import EngineRefusal, Frames, LoadProgress, News, Stuck, framed
from paceline.server.border.remote import RemoteEngine

LONG = dict(BODY, max_tokens=2000)
SHARED = {  # a model that two ranks can share
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


@contextmanager
def serve(*more):
    """(the process of HTTP, its address, those of its engine)"""
    with child([*COMMAND, *more], stderr=STDOUT, stdout=PIPE, text=True) as process:
        yield process, address_in(process.stdout), below(process.pid)


def below(pid):
    """Every process that a process has started, and those that they have."""
    told = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(each) for path in told for each in path.read_text().split()]
    return [*children, *(each for one in children for each in below(one))]


def is_gone(pid):
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


@contextmanager
def streaming(url, **more):
    """The lines of a long answer that has begun."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | more, timeout=None) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def test_an_engine_that_is_killed_ends_its_streams_and_the_server():
    with serve("--speculative-algorithm", "off") as (process, url, (engine,)):
        with streaming(url) as lines:
            os.kill(engine, signal.SIGKILL)
            last = [line for line in lines if line][-1]
        said = process.stdout.read()
    assert "the engine must be running, got ended by SIGKILL; restart the server" in last
    assert "the engine must be running, got ended by SIGKILL; restart the server" in said
    assert process.returncode == 1


def test_an_engine_and_its_ranks_end_with_http(tmp_path):
    """On two ranks, whose answers cross like any others (without a tokenizer they have no text);
    nobody is left, nor memory with a name."""
    before = set(os.listdir("/dev/shm"))
    (tmp_path / "config.json").write_text(json.dumps(SHARED))
    words = ("--served-model-name", "bundled", "--load-format", "dummy", "--max-num-seqs", "2")
    with serve(str(tmp_path), "--tp", "2", *words) as (process, url, others):
        assert len(others) == 2
        with (
            suppress(httpx.RemoteProtocolError),
            streaming(url, prompt=[5, 6, 7], max_tokens=16000, logprobs=0) as lines,
        ):
            next(lines)
            process.kill()
            began = time.monotonic()
            wait_until(lambda: all(map(is_gone, others)))
            assert time.monotonic() - began < 5.0  # a second, where nobody else wants the cores
    assert set(os.listdir("/dev/shm")) <= before


def test_a_stopped_engine_is_told_and_goes_on_where_it_was():
    """And signals for everybody in the group are not for it."""
    words = ("--stuck-seconds", "1", "--drain-seconds", "600")
    with serve(*words) as (process, url, (engine,)):
        with streaming(url, max_tokens=300) as lines:
            os.kill(engine, signal.SIGSTOP)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            probe = httpx.get(f"{url}/health").json()["error"]
            late = httpx.post(f"{url}/v1/completions", json=BODY | {"deadline_s": 0.2})
            assert late.status_code == 504
            os.kill(engine, signal.SIGCONT)
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
            time.sleep(2 * remote._BEAT_S)  # the log hears of it at the next beat
            os.kill(engine, signal.SIGINT)
            os.kill(engine, signal.SIGTERM)
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        said = process.stdout.read()
    assert probe["code"] == "engine_stuck"
    assert probe["message"].startswith("the engine must be answering within 1 s, got silent for ")
    assert "the engine must be answering within 1 s" in said
    assert "the engine answers again" in said
    assert said.endswith("stopped\n")
    assert process.returncode == 0


class Loads(Hosted):
    """An engine that loads until it is told to go on."""

    def __init__(self, llm):
        self.going = threading.Event()
        super().__init__(llm)

    def _run(self, theirs):
        theirs.sendall(framed([LoadProgress(phase="loading weights", done=1, total=4)]))
        self.going.wait()
        super()._run(theirs)


def test_the_port_answers_while_the_model_loads(monkeypatch):
    peer, told = Loads(small_llm(speculative_algorithm="off")), queue.SimpleQueue()
    found = {}

    def ask(url):
        wait_until(lambda: httpx.get(f"{url}/progress").json()["phase"] == "loading weights")
        for path in ("/progress", "/health", "/ready", "/v1/models", "/nowhere"):
            found[path] = httpx.get(f"{url}{path}")
        peer.going.set()
        address_in(iter(told.get, None))
        for path in ("/ready", "/progress"):
            found[f"{path} later"] = httpx.get(f"{url}{path}")
        stop()

    failure, _ = served(peer, ask, told.put)
    assert failure is None
    progress = found["/progress"].json()
    assert progress["percent"] == 25.0
    assert progress["eta_s"] >= 0.0
    assert (found["/health"].status_code, found["/health"].json()) == (200, {"status": "loading"})
    for path in ("/ready", "/v1/models", "/nowhere"):
        assert (found[path].status_code, "retry-after" in found[path].headers) == (503, True)
        error = found[path].json()["error"]
        assert error["code"] == "loading"
        assert error["message"].startswith("the server must be ready, got loading weights, 25 %; ")
    assert found["/ready later"].status_code == 200
    assert found["/progress later"].json()["phase"] == "ready"


def test_a_load_that_hangs_is_not_healthy_and_its_phase_is_named():
    peer, told = Loads(small_llm()), queue.SimpleQueue()
    found = []

    def ask(url):
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        found.append(httpx.get(f"{url}/health").json()["error"])
        peer.going.set()
        address_in(iter(told.get, None))
        found.append(httpx.get(f"{url}/health").json())
        stop()

    failure, _ = served(peer, ask, told.put, load_stuck_s=0.5)
    assert failure is None
    hung, ready = found
    assert hung["code"] == "engine_stuck"
    assert hung["message"].startswith("the load must be further within 0.5 s, got silent for ")
    assert "in the phase 'loading weights'; restart the server, or raise" in hung["message"]
    assert ready == {"status": "ok"}


def test_a_server_that_is_told_to_stop_while_it_loads_ends_its_engine():
    peer = Loads(small_llm(speculative_algorithm="off"))
    kill = peer.kill
    peer.kill = lambda: (kill(), peer.going.set())

    def ask(url):
        assert httpx.get(f"{url}/ready").status_code == 503  # it hears signals
        stop()

    failure, _ = served(peer, ask, lambda text: None)
    assert failure is None
    assert peer.num_kills >= 1


def test_every_request_is_a_line_of_the_access_log(monkeypatch):
    peer, told, lines = Hosted(small_llm(speculative_algorithm="off")), queue.SimpleQueue(), []

    def ask(url):
        address_in(iter(told.get, None))
        body = dict(BODY, model="tiny", prompt=[5, 6, 7], max_tokens=4, n=2, seed=1)
        for stream in (False, True):
            headers = {"X-Request-Id": f"mine{stream:d}"}
            httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}, headers=headers)
        httpx.get(f"{url}/nowhere")
        monkeypatch.setattr(RemoteEngine, "look", None)  # a bug
        httpx.get(f"{url}/metrics", headers={"X-Request-Id": "bug"})
        stop()

    served(peer, ask, told.put, log=lines.append)
    whole, streamed, nowhere, bug = map(json.loads, lines)
    assert (bug["status"], bug["id"]) == (500, "bug")
    for number, line in enumerate((whole, streamed)):
        assert (line["id"], line["client"], line["status"]) == (f"mine{number}", "127.0.0.1", 200)
        assert (line["method"], line["path"]) == ("POST", "/v1/completions")
        assert (line["prompt_tokens"], line["output_tokens"]) == (3, 8)
        assert line["finish"] == ["length", "length"]
        assert 0 < line["ttft_s"] < line["latency_s"]
        assert abs(line["time"] - time.time()) < 600
    assert (nowhere["status"], nowhere["finish"], nowhere["ttft_s"]) == (404, [], None)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_frames_are_read_in_whatever_pieces_they_come(size):
    told = [
        EngineRefusal.of(CapacityError("too long"), number=3),
        LoadProgress(phase="x", done=1, total=2),
    ]
    data, frames, read = framed(told) + framed(told[:1]), Frames(News), []
    for begin in range(0, len(data), size):
        read += frames.feed(data[begin : begin + size])
    assert read == [*told, told[0]]
    error = read[0].error()
    assert (type(error), str(error)) == (CapacityError, "too long")


def test_progress_is_told_when_somebody_may_look():
    class Box(list):
        put = list.append

        def send(self):
            pass

    box = Box()
    say = progress_to(box)
    for done in (0, 1, 2, 100):
        say("loading weights", done, 100)
    assert [each.done for each in box] == [0, 100]
    say("recording graphs", 0, 9)
    assert box[-1] == LoadProgress(phase="recording graphs", done=0, total=9)


def test_a_turn_that_does_not_end_is_told_until_it_does(monkeypatch):
    ours, theirs = socket.socketpair()
    left, told = threading.Event(), queue.SimpleQueue()
    monkeypatch.setattr(engine_main, "leave", lambda code: left.set())
    monkeypatch.setattr(engine_main, "_BEAT_MS", 5)

    class Box:
        put = staticmethod(told.put)

        def send(self):
            pass

    watch = engine_main.Watch(theirs, Box(), 0.5)
    began = time.monotonic() - 1.0
    watch.turning_since = lambda: began
    assert told.get().phase.startswith("a place")
    watch.turning_since = lambda: None
    assert told.get() == Stuck(phase=None)
    assert not left.is_set()
    ours.close()
    left.wait()
    theirs.close()


def test_health_says_in_what_a_turn_hangs():
    with serving(small_llm(speculative_algorithm="off")) as server:
        for phase, status in (("wait of paceline.runner.x", 503), (None, 200)):
            server.host._outbox.put(Stuck(phase=phase))
            server.host._outbox.send()
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == status)  # noqa: B023
            if phase:
                error = httpx.get(f"{server.url}/ready").json()["error"]
        assert error["code"] == "engine_stuck"
        assert "in wait of paceline.runner.x; wait, or restart" in error["message"]


def test_a_stuck_turn_is_named_by_the_innermost_function_of_ours():
    seen = []

    class Box(list):
        def put(self, message):
            seen.append(place_of(sys._getframe()))

        def send(self):
            pass

    progress_to(Box())("x", 0, 1)
    assert seen == ["progress_to.<locals>.say of paceline.server.border.engine_main"]
    assert place_of(None) == "a place that is not known"
