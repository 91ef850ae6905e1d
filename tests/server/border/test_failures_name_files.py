"""A request that fails with its engine, or by its logits, is told where the last steps are."""

import math
import queue
import socket
import threading
import time

import httpx
import pytest
from serving import Hosted, serving, small_llm
from test_serve_command import BODY, address_in, served

from paceline.server.border import engine_main
from paceline.server.border.messages import Stuck

ASK = dict(BODY, model="tiny", stream=False, max_tokens=8)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_names_its_file(tmp_path, monkeypatch, caplog, stream):
    llm, told = small_llm(black_box_dir=str(tmp_path)), queue.SimpleQueue()
    peer = Hosted(llm)
    launch = llm.engine._runner.launch

    def fail(step):
        if step.layout.extend_lens == (1,):
            raise RuntimeError("out of memory")
        return launch(step)

    monkeypatch.setattr(llm.engine._runner, "launch", fail)

    def ask(_):
        url = address_in(iter(told.get, None))
        return httpx.post(f"{url}/v1/completions", json=ASK | {"stream": stream}, timeout=None)

    failure, answer = served(peer, ask, told.put)
    [path] = tmp_path.iterdir()
    text = f"got ended by RuntimeError('out of memory'); its last steps are in {path.name}; restart"
    assert text in failure
    assert text in answer.text
    assert answer.status_code == (200 if stream else 500)
    assert f"the last steps are in {path.name}; paceline debug replay {path}" in caplog.text


def test_a_request_whose_logits_are_not_finite_names_it_alone(tmp_path):
    llm = small_llm(black_box_dir=str(tmp_path))
    with serving(llm) as server:
        llm._live.runner.parts.model.decoder.embedding.register_forward_hook(
            lambda module, ids, rows: rows.index_fill_(0, (ids[0] == 77).nonzero()[:, 0], math.nan)
        )
        ask = ASK | {"logit_bias": {"77": 100}}
        failed = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=None)
        whole = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=None)
    [path] = tmp_path.iterdir()
    error = failed.json()["error"]
    assert (failed.status_code, error["code"]) == (500, "generation_failed")
    assert error["message"].endswith(f"weights and dtype; its last steps are in {path.name}")
    assert whole.status_code == 200


def test_a_turn_that_hangs_is_told_before_its_file_is_written(monkeypatch):
    ours, theirs = socket.socketpair()
    left, told = threading.Event(), queue.SimpleQueue()
    monkeypatch.setattr(engine_main, "leave", lambda code: left.set())
    monkeypatch.setattr(engine_main, "_BEAT_MS", 5)

    class Box:
        put = staticmethod(told.put)

        def send(self):
            pass

    watch = engine_main.Watch(theirs, Box(), 0.5)
    place, is_written = "a place that is not known", threading.Event()

    def keep(where):
        is_written.wait()  # for a folder that hangs, too
        return f"its last steps are in {where[:7]}.box.json"

    watch.keep = keep
    began = time.monotonic() - 1.0
    watch.turning_since = lambda: began
    assert told.get(timeout=10) == Stuck(phase=place)
    is_written.set()
    kept = Stuck(phase=f"{place}; its last steps are in a place.box.json")
    assert told.get(timeout=10) == kept
    is_written.clear()
    watch.turning_since = lambda: None
    assert told.get(timeout=10) == Stuck(phase=None)
    watch.turning_since = lambda: began
    assert told.get(timeout=10) == Stuck(phase=place)
    watch.turning_since = lambda: None
    assert told.get(timeout=10) == Stuck(phase=None)
    is_written.set()  # later than the turn: nobody hears of it
    time.sleep(0.1)
    assert told.empty()
    watch.keep = lambda where: None
    with serving(small_llm()) as server:
        goes_on = threading.Event()
        monkeypatch.setattr(server.host.followed, "make_ready", lambda: not goes_on.wait(20))
        watch.turning_since = lambda: server.host.turning_since
        httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=None)
        assert told.get(timeout=10) == Stuck(phase=place)  # a capture, while nothing runs
        goes_on.set()
        assert told.get(timeout=10) == Stuck(phase=None)
    ours.close()
    assert left.wait(10)
    theirs.close()
