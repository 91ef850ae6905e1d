"""Clients share a server: turns, priorities within one, deadlines."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from click.testing import CliRunner
from serving import FIRST_WORDS, serving, small_llm, wait_until

from paceline.cli.app import app
from paceline.server.limits import ServerLimits

SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 2}
MANY = {"model": "tiny", "prompt": "y", "max_tokens": 20, "n": 60, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with serving(small_llm(), api_keys=["one", "two"], limits=ServerLimits(max_queued=48)) as world:
        yield world


@pytest.fixture
def ask(server):
    def asked(key, body, **more):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(
            f"{server.url}/v1/completions", json=body | more, headers=headers, timeout=None
        )

    yield asked
    server.turns.go()
    wait_until(server.is_idle)


def waiting(server):
    return server.llm.engine.scheduler.num_waiting


def test_one_clients_many_completions_do_not_hold_up_anothers_few_tokens(ask, server):
    """Nor fill the last part of the queue; its own next ones wait behind them."""
    server.turns.hold(after=FIRST_WORDS)
    with ThreadPoolExecutor(2) as clients:
        many = clients.submit(ask, "one", MANY)
        wait_until(lambda: waiting(server) >= 44)
        refused = ask("one", SHORT, n=3)
        assert refused.status_code == 503
        text = "the queue must be at most 62 completions, running and waiting, got 60 and 3 of this"
        assert refused.json()["error"]["message"].startswith(text)
        few = clients.submit(ask, "two", SHORT)
        wait_until(lambda: waiting(server) >= 45)
        server.turns.hold(after=35)
        assert few.result(timeout=100).status_code == 200
        assert waiting(server) > 20
        server.turns.go()
        assert len(many.result().json()["choices"]) == 60


def test_a_deadline_ends_the_request_wherever_it_is(ask, server):
    server.turns.hold(after=FIRST_WORDS)
    late = ask("one", MANY, n=1, deadline_s=0.05)
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"
    text = "an answer must be whole by its deadline, got less; give it more time"
    assert late.json()["error"]["message"].startswith(text)
    streamed = ask("one", MANY, n=1, deadline_s=2.0, stream=True)  # taken long before
    assert '"code":"deadline_exceeded"' in streamed.text
    assert "[DONE]" not in streamed.text
    server.turns.go()
    wait_until(server.is_idle)
    assert ask("one", SHORT, deadline_s=3600.0).status_code == 200
    assert not server.engine.callers._deadlines


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"priority": 1001}, "priority must be an integer of at most 1000, got 1001"),
        ({"priority": 0.5}, "priority must be an integer, got 0.5"),
        ({"deadline_s": 0}, "deadline_s must be a number of at least 0.001, got 0"),
    ],
)
def test_what_cannot_be_is_refused(ask, more, text):
    refused = ask("two", SHORT | more)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(text)


def test_shares_are_by_key_where_there_are_several_and_else_by_address(ask, server, monkeypatch):
    seen = []
    enqueue = type(server.llm).enqueue.__get__(server.llm)
    monkeypatch.setattr(
        server.llm, "enqueue", lambda found: seen.extend(f.share for f in found) or enqueue(found)
    )
    ask("two", SHORT, priority=-3)
    assert [(each.client, each.priority) for each in seen] == [("key2", -3)]
    assert ask("three", SHORT).status_code == 401


@pytest.mark.parametrize("weight", ["3", "a=", "a=0", "a=-1", "a=inf", "a=nan", "=2"])
def test_a_weight_that_is_none_is_refused(weight):
    done = CliRunner().invoke(app, ["serve", "--client-weight", weight])
    assert done.exit_code == 2
    assert f"must be CLIENT=WEIGHT with a weight above 0, got '{weight}'" in done.stderr


def test_without_keys_a_client_is_its_address_with_its_weight():
    seen = []
    llm = small_llm(speculative_algorithm="off")
    enqueue = llm.enqueue
    llm.enqueue = lambda found: seen.extend(each.share for each in found) or enqueue(found)
    with serving(llm, weights={"127.0.0.1": 2.5}) as server:
        httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=None)
    assert [(each.client, each.weight) for each in seen] == [("127.0.0.1", 2.5)]
