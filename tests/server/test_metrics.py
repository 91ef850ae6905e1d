"""What Prometheus reads of a server, read by Prometheus' own parser."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import FIRST_WORDS, serving, small_llm, wait_until

from paceline.server.border import remote

BODY = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with serving(small_llm()) as world:
        yield world


def metrics(server):
    page = httpx.get(f"{server.url}/metrics", timeout=None)
    assert page.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(page.text)
    return {
        each.name.removeprefix("paceline_"): each.value
        for family in families
        for each in family.samples
        if not each.labels
    }


def test_what_has_ended_is_counted_whole_and_streamed(server):
    for body in (BODY, BODY | {"stream": True}, BODY | {"n": 3, "seed": 1}):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=None)
    wait_until(server.is_idle)
    found = metrics(server)
    assert found["generation_tokens_total"] == 8 * 5
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert found[f"{name}_seconds_count"] == 3
        assert found[f"{name}_seconds_sum"] > 0
    assert found["time_to_first_token_seconds_sum"] < found["e2e_request_latency_seconds_sum"]
    prompt = len(server.tokenizer.encode(BODY["prompt"]))
    assert found["prompt_tokens_total"] == 3 * prompt
    queried = found["prefix_cache_queried_tokens_total"]
    assert queried >= 3 * prompt
    assert metrics(server)["prefix_cache_queried_tokens_total"] == queried
    assert (found["requests_running"], found["requests_waiting"], found["engine_up"]) == (0, 0, 1)


def test_steps_are_timed_by_kind_and_never_taken_back(server):
    found = []
    for _ in range(2):
        httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=None)
        page = httpx.get(f"{server.url}/metrics", timeout=None).text
        found.append(
            {
                (each.name, each.labels["kind"], each.labels.get("le")): each.value
                for family in text_string_to_metric_families(page)
                for each in family.samples
                if family.name == "paceline_step_seconds"
            }
        )
    before, after = found
    assert before.keys() <= after.keys()
    assert all(before[key] <= after[key] for key in before)
    for kind in ("prefill", "round"):  # the bundled model drafts
        count = after["paceline_step_seconds_count", kind, None]
        assert count == after["paceline_step_seconds_bucket", kind, "+Inf"] > 0
        assert after["paceline_step_seconds_sum", kind, None] > 0


def test_what_runs_and_waits_is_shown(server):
    server.turns.hold(after=FIRST_WORDS)
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=BODY | {"n": 20, "seed": 1, "stream": True},
        timeout=None,
    ):
        wait_until(lambda: metrics(server)["requests_running"] == 16)
        found = metrics(server)
        assert found["requests_waiting"] == 4
        assert 0 < found["kv_cache_usage_ratio"] <= 1
    server.turns.go()
    wait_until(server.is_idle)


def test_an_engine_that_does_not_answer_is_shown_as_down(server, monkeypatch):
    monkeypatch.setattr(remote, "_LOOK_S", 0.05)
    monkeypatch.setattr(server.engine, "_ask", lambda: server.loop.create_future())
    assert metrics(server)["engine_up"] == 0
