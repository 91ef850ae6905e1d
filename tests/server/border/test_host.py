"""A Host: what waits for a form of an answer, and what a request can end."""

import asyncio
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import serving, small_llm, wait_until

from paceline.core.errors import BusyError, FormsError, ShareError
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.request import Share
from paceline.llm.admission import Admission
from paceline.server.border.host import Host
from paceline.server.border.live_forms import FormLimits
from paceline.server.border.messages import Leave, framed
from paceline.server.border.outbox import Outbox
from paceline.server.errors import as_api_error
from paceline.text.structured import StructureCompiler

PLAIN = {"model": "tiny", "prompt": "x", "max_tokens": 2}


class Panic(BaseException):
    """As pyo3 has it."""


@pytest.fixture(scope="module")
def server():
    with serving(small_llm()) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(server):
    yield
    wait_until(server.is_idle)
    assert not server.host._formed


def post(server, **more):
    return httpx.post(f"{server.url}/v1/completions", json=PLAIN | more, timeout=None)


def of_loop(server, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, server.loop)


def ask(server, regex):
    """The future of a ticket."""
    params = SamplingParams(max_tokens=2, structured_outputs={"regex": regex})
    return of_loop(server, server.engine.generate([[5]], params, share=Share(), stream=False))


@pytest.mark.parametrize("fault", [IndexError, Panic])
@pytest.mark.parametrize(
    ("owner", "name", "asked"),
    [(StructureCompiler, "grammar", {"guided_regex": "a"}), (Admission, "admit", {})],
)
def test_a_fault_of_admission_ends_its_request_alone(
    server, monkeypatch, caplog, owner, name, asked, fault
):
    def broken(*values):
        raise fault("of another")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        answer = post(server, **asked)
    assert answer.status_code == 500
    told = f"the request must be one that can be admitted, got {fault('of another')!r}; "
    assert answer.json()["error"]["message"].startswith(told)
    assert "a request could not be admitted" in caplog.text
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert post(server).status_code == 200


def test_forms_are_made_one_by_one_and_what_needs_none_passes(server, monkeypatch):
    going, begun, make = threading.Event(), [], StructureCompiler._make

    def held(self, wanted):
        begun.append(wanted.text)
        if wanted.text == "slow":
            going.wait()
        return make(self, wanted)

    def num_waiting():
        return of_loop(server, server.engine.look()).result().waiting

    monkeypatch.setattr(StructureCompiler, "_make", held)
    assert post(server, guided_regex="known").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, server, guided_regex="slow", n=3)
        wait_until(lambda: "slow" in begun)
        left, stopped = ask(server, "left"), ask(server, "stopped")
        wait_until(lambda: num_waiting() == 5)
        assert post(server, guided_regex="known").status_code == 200
        left.cancel()
        wait_until(lambda: num_waiting() == 4)
        server.loop.call_soon_threadsafe(server.engine.abort)
        with pytest.raises(BusyError, match="the server must be running, got stopping; send it to"):
            stopped.result()
        assert slow.result().status_code == 503
        going.set()
    assert post(server, guided_regex="next").status_code == 200
    assert begun == ["known", "slow", "next"]


def ask_as(server, client, regex):
    return of_loop(
        server,
        server.engine.generate(
            [[5]],
            SamplingParams(max_tokens=4, structured_outputs={"regex": regex}),
            share=Share(client=client),
            stream=False,
        ),
    )


def limit_forms(server, monkeypatch, **limits):
    monkeypatch.setattr(server.host._live_forms, "_limits", FormLimits(**limits))


def test_different_forms_of_a_client_are_bounded_while_they_live(server, monkeypatch):
    """And those of all; equal ones count once, and what has ended counts no more."""
    limit_forms(server, monkeypatch, of_client=2, of_all=3)
    server.turns.hold(after=0)
    asked = [("one", "a+"), ("one", "b+"), ("one", "a+"), ("two", "a+"), ("two", "c+")]
    tickets = [ask_as(server, client, regex).result() for client, regex in asked]
    expected = "structured_outputs of one client must be at most 2 different forms at once, got one"
    with pytest.raises(ShareError, match=expected):
        ask_as(server, "one", "c+").result()
    with pytest.raises(FormsError, match="of all clients must be at most 3 different forms"):
        ask_as(server, "three", "d+").result()
    tickets.append(ask_as(server, "three", "c+").result())
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.turns.go()
    wait_until(lambda: not server.host.followed)
    tickets.append(ask_as(server, "one", "d+").result())
    for ticket in tickets:
        server.loop.call_soon_threadsafe(ticket.close)


def test_the_last_forms_are_for_clients_that_have_none(server, monkeypatch):
    limit_forms(server, monkeypatch, of_all=8)
    server.turns.hold(after=0)
    tickets = [ask_as(server, "one", regex).result() for regex in "abcdefg"]
    expected = "of a client that has some must be at most 7 different forms of all clients at once"
    with pytest.raises(ShareError, match=expected):
        ask_as(server, "one", "h").result()
    tickets.append(ask_as(server, "two", "h").result())
    with pytest.raises(FormsError, match="of all clients must be at most 8 different forms"):
        ask_as(server, "four", "d+").result()
    server.turns.go()
    wait_until(lambda: not server.host.followed)
    for ticket in tickets:
        server.loop.call_soon_threadsafe(ticket.close)


def test_a_client_with_too_many_forms_gets_429(server, monkeypatch):
    limit_forms(server, monkeypatch, of_client=0)
    answer = post(server, guided_regex="a")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "too_much_at_once")
    assert "send it again when one of them has ended" in error["message"]
    assert "or raise --max-forms-per-client of the server" in error["message"]
    assert post(server).status_code == 200
    error = as_api_error(ShareError("x")).document("/v1/messages")["error"]
    assert error["type"] == "rate_limit_error"


def test_too_many_forms_of_all_have_a_code_of_their_own(server, monkeypatch):
    limit_forms(server, monkeypatch, of_all=0)
    answer = post(server, guided_regex="a")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "too_many_forms"
    assert "or raise --max-forms of the server" in answer.json()["error"]["message"]


def test_graphs_are_made_ready_in_a_lull_alone(server, monkeypatch):
    asked = []

    def idle(self):
        asked.append(len(asked))
        return len(asked) % 3 > 0

    monkeypatch.setattr(Engine, "idle", idle)
    monkeypatch.setattr("paceline.server.border.host.LULL_S", 60.0)
    assert [post(server).status_code for _ in range(2)] == [200, 200]
    assert not asked
    monkeypatch.setattr("paceline.server.border.host.LULL_S", 0.01)
    assert post(server).status_code == 200
    wait_until(lambda: len(asked) == 3)  # until there is none
    assert post(server).status_code == 200


def test_descriptors_may_have_large_numbers():
    """Of a process with many files; select() takes them below 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("the limit of open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    ours, theirs = socket.socketpair()
    many = socket.socket(fileno=os.dup2(theirs.fileno(), 1500))
    theirs.close()
    try:
        with small_llm(speculative_algorithm="off") as llm, many, ours:
            host = Host(llm, many, Outbox(many))
            ours.sendall(framed([Leave()]))
            assert host.run()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
