"""`paceline bench serve`: what it sends, what it counts, what its numbers mean."""

import json
import math
import signal
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from fake_openai import CHARS_PER_TOKEN, FIXED, fake_server

from children import hearing_ctrl_c
from paceline.bench.page import page
from paceline.bench.serve.asks import Scale, ServedModel
from paceline.bench.serve.bench import bench_serve
from paceline.bench.serve.client import Place
from paceline.bench.serve.load import Answer, Load
from paceline.bench.serve.report import Goodput, ServeReport
from paceline.bench.serve.shape import LoadShape, Slo
from paceline.bench.traffic.shape import Lengths, TrafficShape
from paceline.cli.app import app
from paceline.core.errors import ConfigError, IntegrityError, ModelError

SCHEMA = json.loads(
    (Path(__file__).parents[3] / "docs" / "schemas" / "bench_serve.json").read_text()
)
TRAFFIC = TrafficShape(
    num_requests=10,
    input_len=Lengths(least=10, mean=40, most=200),
    output_len=Lengths(least=2, mean=6, most=12),
)
SHAPE = LoadShape(traffic=TRAFFIC, concurrency=3, warmups=2, checks=1)
BEFORE = 2 + 2 + 2  # requests before the load: counted texts, one checked twice, warm-ups


def bench(fake, shape=SHAPE, **how):
    how = {"base_url": fake.url, "model": None, "api_key": None, **how}
    report = bench_serve(shape, **how)
    document = report.to_json()
    jsonschema.validate(document, SCHEMA)
    json.dumps(document, allow_nan=False)
    return document


def test_every_request_of_a_closed_loop_is_answered_and_counted_by_usage():
    with fake_server() as fake:
        document = bench(fake)
    load = fake.bodies[BEFORE:]
    assert document["requests"] == {"asked": 10, "answered": 10, "failed": 0}
    assert document["tokens"]["output"] == sum(body["max_tokens"] for body in load)
    prompts = [FIXED + len(body["prompt"]) // CHARS_PER_TOKEN for body in load]
    assert document["tokens"]["prompt"] == sum(prompts)
    assert fake.connections <= 1 + 3, "connections are used again"
    assert all(body["stream_options"] == {"include_usage": True} for body in load)
    assert all(body["ignore_eos"] and body["model"] == "fake" for body in load)
    assert document["output_tok_s"] * document["seconds"] == pytest.approx(
        document["tokens"]["output"]
    )
    line = document["timeline"]
    assert sum(line["output_tok_s"]) * line["slice_s"] == pytest.approx(
        document["tokens"]["output"]
    )


def test_prompts_have_about_the_asked_lengths_without_a_tokenizer():
    shape = replace(SHAPE, traffic=replace(TRAFFIC, shared_prefix_len=50))
    with fake_server() as fake:
        document = bench(fake, shape)
    assert document["tokens"]["per_char"] == pytest.approx(1 / CHARS_PER_TOKEN, rel=0.01)
    assert document["tokens"]["prompt"] / 10 == pytest.approx(50 + 40, rel=0.1)
    texts = [body["prompt"] for body in fake.bodies[BEFORE:]]
    assert len({text[:180] for text in texts}) == 1
    assert len({text[:220] for text in texts}) == 10


def test_the_same_seed_sends_the_same_and_another_something_else():
    sent = []
    for seed in (0, 0, 1):
        with fake_server() as fake:
            bench(fake, replace(SHAPE, seed=seed))
        sent.append([(body["prompt"], body["max_tokens"]) for body in fake.bodies])
    assert sorted(sent[0]) == sorted(sent[1])
    assert not {text for text, _ in sent[0]} & {text for text, _ in sent[2]}


def test_an_open_loop_sends_when_due_however_many_run():
    shape = replace(SHAPE, concurrency=None, traffic=replace(TRAFFIC, request_rate=500.0))
    with fake_server() as fake:
        report = bench_serve(shape, base_url=fake.url, model=None, api_key=None)
    due = sorted(answer.due_s for answer in report.load.answers)
    assert len(set(due)) == 10
    assert due[0] > 0
    assert all(answer.sent_s >= answer.due_s for answer in report.load.answers)
    assert report.load.seconds > due[-1]
    assert report.to_json()["load"]["loop"] == "open"


def test_chat_sends_messages_and_its_opening_is_no_token():
    with fake_server() as fake:
        shape = replace(SHAPE, endpoint="chat")
        report = bench_serve(shape, base_url=fake.url, model="mine", api_key="sesame")
    assert all(body["messages"][0]["role"] == "user" for body in fake.bodies)
    assert {body["model"] for body in fake.bodies} == {"mine"}
    assert all("\r\nauthorization: bearer sesame\r\n" in b["head"].lower() for b in fake.bodies)
    for answer in report.load.answers:
        assert len(answer.came_s) == answer.output_tokens


@pytest.mark.parametrize("hooks", [{"is_dribbling": True}, {"closes": True}], ids=str)
def test_streams_are_read_however_they_are_cut(hooks):
    with fake_server(**hooks) as fake:
        document = bench(fake)
    assert document["requests"]["answered"] == 10
    assert document["tokens"]["output"] == sum(b["max_tokens"] for b in fake.bodies[BEFORE:])


def failing(fake_has, errors):
    """A server that begins to fail behind the warm-up."""
    with fake_server(**fake_has) as fake:
        document = bench(fake)
    assert {kind: row["count"] for kind, row in document["errors"].items()} == errors
    failed = sum(errors.values())
    assert document["requests"] == {"asked": 10, "answered": 10 - failed, "failed": failed}
    return document


def test_refusals_are_counted_by_status_and_no_tokens_of_theirs():
    document = failing(
        {"status": lambda number, body: 503 if number in (BEFORE, BEFORE + 4) else 200},
        {"503": 2},
    )
    assert 'got 503: {"error": {"message": "no"}}' in document["errors"]["503"]["first"]
    assert document["goodput"] is None
    assert sum(document["timeline"]["failed"]) == 2


def test_an_answer_of_another_length_is_an_error_unless_it_may_end_by_itself():
    def longer(body):
        return body["max_tokens"] + (body.get("stream", False) and body["max_tokens"] % 2)

    shape = replace(SHAPE, warmups=0)
    with fake_server(num_tokens=longer) as fake:
        document = bench(fake, shape)
        odd = sum(body["max_tokens"] % 2 for body in fake.bodies[4:])
        assert document["errors"]["wrong length"]["count"] == odd > 0
        document = bench(fake, replace(shape, natural_end=True))
    assert not document["errors"]
    assert "ignore_eos" not in fake.bodies[-1]


@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        ({"has_usage": False}, "no usage: usage of an answer must be prompt_tokens"),
        ({"ends_early": True}, "RemoteProtocolError"),
        ({"says_done": False}, "the stream ended without"),
        ({"error_event": True}, 'error event: {"message": "broken"}'),
        ({"status": lambda number, body: 500 if body.get("stream") else 200}, "got 500"),
        ({"status": lambda number, body: 404}, "got 404"),
    ],
    ids=["usage", "early", "done", "event", "500", "404"],
)
def test_a_server_that_cannot_be_measured_is_told_before_the_load(hooks, text):
    with fake_server(**hooks) as fake, pytest.raises(IntegrityError, match=text):
        bench(fake)


def test_texts_that_differ_at_temperature_0_are_no_result():
    with (
        fake_server(text=lambda number, body: f"answer {'b' if number == 3 else 'a'}") as fake,
        pytest.raises(IntegrityError, match="the same, 'a' behind 7 characters, got 'b'"),
    ):
        bench(fake, replace(SHAPE, traffic=replace(TRAFFIC, temperature=0.9)))
    assert [body["temperature"] for body in fake.bodies[2:]] == [0, 0]


def test_sampled_requests_carry_their_parameters_and_a_seed_each():
    with fake_server() as fake:
        bench(fake, replace(SHAPE, seed=7, traffic=replace(TRAFFIC, temperature=0.5, top_p=0.9)))
    load = fake.bodies[BEFORE:]
    assert {(body["temperature"], body["top_p"]) for body in load} == {(0.5, 0.9)}
    assert sorted(body["seed"] for body in load) == list(range(9, 19))


def test_a_file_gives_prompts_and_about_the_lengths_of_its_answers(tmp_path):
    path = tmp_path / "talks.json"
    talks = [
        {"conversations": [{"value": f"{n} " + "q" * 40 * n}, {"value": "a" * 8 * n}]}
        for n in range(1, 31)
    ]
    path.write_text(json.dumps(talks))
    shape = replace(SHAPE, traffic=TrafficShape(num_requests=10, dataset=path))
    with fake_server() as fake:
        bench(fake, shape)
        for body in fake.bodies[BEFORE:]:
            number = int(body["prompt"].split()[0])
            assert body["max_tokens"] == pytest.approx(2 * number, abs=1)
        with pytest.raises(ConfigError, match="at least 42, those before the load included, got"):
            bench(fake, replace(shape, traffic=replace(shape.traffic, num_requests=40)))
    with fake_server(context_len=100) as fake:
        with pytest.raises(ConfigError, match="at least 12"):
            bench(fake, shape)
        short = replace(shape, warmups=1, traffic=replace(shape.traffic, num_requests=2))
        assert bench(fake, short)["tokens"]["prompt"] < 200
    path.write_text(json.dumps([{"conversations": [{"value": "a"}, {"value": "b"}]}]))
    with fake_server() as fake, pytest.raises(ConfigError, match="more than 64 characters"):
        bench(fake, shape)


def test_ctrl_c_leaves_what_was_answered():
    main = threading.main_thread().ident

    def status(number, body):
        if number == BEFORE + 5:
            signal.pthread_kill(main, signal.SIGINT)
        return 200

    with hearing_ctrl_c(), fake_server(status=status) as fake:
        document = bench(fake)
    assert document["interrupted"]
    assert 0 < document["requests"]["answered"] < 10

    def at_once(number, body):
        signal.pthread_kill(main, signal.SIGINT)
        return 200

    with hearing_ctrl_c(), fake_server(status=at_once) as fake, pytest.raises(KeyboardInterrupt):
        bench(fake)


def answered(due=0.0, first=0.1, last=0.5, tokens=5, **more):
    came = (due + first, due + last) if tokens > 1 else (due + first,)
    return Answer(
        due_s=due, sent_s=due, came_s=came, ended_s=due + last, wanted=tokens,
        prompt_tokens=10, output_tokens=tokens, **more,
    )  # fmt: skip


def reported(*answers, seconds=2.0, is_cut=False, **shape):
    target = ServedModel(base_url="http://x/v1", model="m", context_len=None, is_ours=False)
    load = Load(
        target=target,
        scale=Scale(fixed=0.0, per_char=0.25),
        num_asked=len(answers),
        answers=answers,
        seconds=seconds,
        is_cut=is_cut,
    )
    return ServeReport(shape=replace(SHAPE, **shape), load=load, started=None)


def test_goodput_counts_answers_that_keep_every_limit():
    answers = (
        answered(),
        answered(first=0.3),  # the first token too late
        answered(last=1.3),  # each further token too late: 0.3 s
        answered(tokens=1, last=0.1),
        answered(error="503"),
    )
    slo = Slo(ttft=200.0, inter_token=150.0)
    report = reported(*answers, slo=slo)
    assert report.goodput == Goodput(requests_s=1.0, share=0.4)
    assert (
        "goodput 1.00 requests/s, 40.0% (ttft <= 200 ms, inter_token <= 150 ms)" in report.table()
    )
    assert reported(*answers, slo=Slo(e2e=1000.0)).goodput.share == 0.6
    with pytest.raises(ConfigError, match="slo_ttft must be a finite number above 0"):
        Slo(ttft=0.0)


def test_waits_are_of_good_answers_and_count_from_when_they_were_due():
    late = replace(answered(due=1.0, queue_s=0.05), sent_s=1.2)
    found = reported(answered(), late, answered(first=9.0, error="503")).to_json()["waits"]
    assert found["ttft_ms"]["p50"] == pytest.approx(100.0)
    assert found["ttft_ms"]["max"] == pytest.approx(100.0)
    assert found["inter_token_ms"]["p50"] == pytest.approx(100.0)
    assert found["gap_ms"]["max"] == pytest.approx(400.0)
    assert found["e2e_ms"]["max"] == pytest.approx(500.0)
    assert found["queue_ms"]["p50"] == pytest.approx(50.0)
    assert found["late_ms"]["max"] == pytest.approx(200.0)


def test_a_load_that_was_cut_or_failed_whole_is_still_told():
    document = reported(answered(tokens=0, error="503"), is_cut=True).to_json()
    jsonschema.validate(document, SCHEMA)
    assert document["interrupted"]
    assert document["waits"]["ttft_ms"] is None
    report = reported(answered(error="503", details="full"))
    assert "ERROR 1 x 503: full" in report.table()


def test_the_page_needs_nothing_from_outside():
    report = reported(answered(), answered(due=1.0), answered(error="503"))
    drawn = page("serve", report.to_json(), report.drawings())
    assert drawn.count("<polyline") == 2 + 1 + 5
    assert "<rect" in drawn
    assert not any(word in drawn for word in ("src=", "href=", "@import", "url("))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"warmups": -1}, "warmups must be at least 0"),
        ({"timeout": math.nan}, "timeout must be at least 0.001"),
        ({"traffic": replace(TRAFFIC, request_rate=2.0)}, "the loop must be open or closed"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_loads_that_cannot_be_made_are_refused(words, text):
    with pytest.raises(ConfigError, match=text):
        replace(SHAPE, **words)


@pytest.mark.parametrize("url", ["127.0.0.1:1/v1", "ftp://x/v1", "http:///v1", "http://x:y/v1"])
def test_a_base_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="base_url must be http"):
        Place.of(url)


def test_places_are_read_from_urls():
    place = Place.of("https://[::1]/api/v1/")
    assert (place.host, place.port, place.path) == ("::1", 443, "/api/v1")
    assert Place.of("http://a:81/v1").port == 81


def run(*words):
    return CliRunner().invoke(app, ["bench", "serve", *words])


def test_the_command_ends_with_the_document_and_draws_a_page(tmp_path):
    path = tmp_path / "page.html"
    lengths = ["--num-requests", "3", "--output-len", "4", "--input-len", "20"]
    with fake_server() as fake:
        done = run("--base-url", fake.url, *lengths, "--html", str(path))
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    assert document["load"]["concurrency"] == 16
    assert "3 of 3 answered" in done.stdout
    assert f"<h1>paceline bench serve on {fake.url}</h1>" in path.read_text()


def test_two_servers_and_none_are_refused():
    done = run("--base-url", "http://127.0.0.1:1/v1", "--", "some-model")
    assert done.exit_code == 2
    assert "the server must be one, got --base-url and some-model" in done.stderr
    done = run("--base-url", "http://127.0.0.1:1/v1")
    assert "server at http://127.0.0.1:1/v1 must be one that answers" in done.stderr
    with fake_server(context_len=30) as fake:
        done = run("--base-url", fake.url, "--input-len", "40")
    assert "at most 30 tokens together, the context" in done.stderr


def test_a_server_that_does_not_start_is_told_with_its_words():
    with pytest.raises(ModelError, match=r"no-such-model.*exit code 2"):
        bench_serve(SHAPE, base_url=None, model=None, api_key=None, words=["no-such-model-here"])


def test_a_server_of_our_own_is_started_asked_and_ended():
    words = ["--threads", "1", "--enforce-eager", "--max-model-len", "512", "--dtype", "float32"]
    report = bench_serve(SHAPE, base_url=None, model=None, api_key=None, words=words)
    document = report.to_json()
    jsonschema.validate(document, SCHEMA)
    assert document["server"]["started_with"] == words
    assert document["requests"] == {"asked": 10, "answered": 10, "failed": 0}
    waits = document["waits"]
    assert 0 <= waits["queue_ms"]["p50"] < waits["ttft_ms"]["max"], "its receipts say"
    sizes = [answer.output_tokens for answer in report.load.answers]
    assert sorted(sizes) == sorted(answer.wanted for answer in report.load.answers)
    assert all(a <= b for answer in report.load.answers for a, b in pairwise(answer.came_s))
    with pytest.raises(ConfigError, match="one that answers"):
        bench_serve(SHAPE, base_url=document["server"]["base_url"], model=None, api_key=None)


def test_help_teaches_loops_and_words():
    text = CliRunner().invoke(app, ["bench", "serve", "--help"]).stdout
    for part in ("--request-rate R  open:", "closed: N clients", "goodput", "-- Qwen/Qwen3-8B"):
        assert part in text
