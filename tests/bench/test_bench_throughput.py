"""The benchmark of traffic: what it sends, what it refuses to tell, what its numbers mean."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from llm_cases import Checkpoint, text_of

from paceline.bench import throughput as bench_module
from paceline.bench.page import page
from paceline.bench.throughput import bench_throughput
from paceline.bench.throughput_report import Steady, over_passes, time_by_kind
from paceline.bench.traffic.one_pass import TrafficPass, run_pass
from paceline.bench.traffic.plan import plan_traffic
from paceline.bench.traffic.shape import USUAL_OUTPUT, Lengths, TrafficShape
from paceline.bench.traffic.waits import percentile
from paceline.bench.turn_log import StepFacts, StepKind, TimedTurn, TurnLog
from paceline.cli.app import app
from paceline.core.errors import ConfigError, IntegrityError, RequestError
from paceline.core.step import RunKind
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.llm.prepare import prepare

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench_throughput.json"
SHAPE = TrafficShape(
    num_requests=6,
    input_len=Lengths(least=3, mean=9, most=30),
    output_len=Lengths(least=2, mean=5, most=9),
    repeats=2,
)


def asked(checkpoint: Checkpoint, **options):
    return {"model": str(checkpoint.folder), "threads": 1, "max_num_seqs": 4, **options}


def plan(checkpoint: Checkpoint, shape: TrafficShape, **options):
    return plan_traffic(shape, prepare(asked(checkpoint, **options)))


def told(checkpoint: Checkpoint, shape: TrafficShape = SHAPE, **options):
    return reported(checkpoint, shape, **options).to_json()


def reported(checkpoint: Checkpoint, shape: TrafficShape = SHAPE, **options):
    report = bench_throughput(asked(checkpoint, **options), shape)
    document = report.to_json()
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    json.dumps(document, allow_nan=False)
    return report


@pytest.fixture(scope="module")
def report(checkpoint):
    return reported(checkpoint)


@pytest.fixture(scope="module")
def document(report):
    return report.to_json()


def test_a_document_tells_of_every_token_of_every_pass(document):
    traffic = document["traffic"]
    assert traffic["num_requests"] == 6
    assert document["check"] | {"repeat_seconds": 0} == {
        "counts_exact": True,
        "repeat_seconds": 0,
        "equal": 6,
        "differ": 0,
        "judged_ties": 0,
        "same_steps": True,
    }
    assert len(document["passes"]) == 2
    for row in [document["first"], *document["passes"]]:
        assert row["output_tok_s"] * row["seconds"] == pytest.approx(traffic["output_tokens"])
        tokens = traffic["input_tokens"] + traffic["output_tokens"]
        assert row["total_tok_s"] * row["seconds"] == pytest.approx(tokens)
        assert row["cached_tokens"] == 0
    first = document["first"]
    assert first["to_steady"] == pytest.approx(
        first["seconds"] / document["steady"]["seconds"]["median"]
    )


def test_time_by_kind_is_the_time_of_the_pass(document):
    for part in (document["first"], document["median_pass"]):
        kinds, longest = part["details"]["kinds"], part["details"]["longest"]
        computed = sum(row["tokens"] for row in kinds)
        # The last token of a request is never computed upon.
        traffic = document["traffic"]
        assert computed == traffic["input_tokens"] + traffic["output_tokens"] - 6
        for row in kinds:
            assert row["padded_tokens"] >= row["tokens"]
        inside = sum(row["seconds"] for row in kinds)
        assert inside + part["outside_s"] >= longest[0]["ms"] / 1e3
        timeline = part["details"]["timeline"]
        tokens = sum(timeline["output_tok_s"]) * timeline["slice_s"]
        assert tokens == pytest.approx(traffic["output_tokens"])
    inside = sum(row["seconds"] for row in document["first"]["details"]["kinds"])
    assert inside + document["first"]["outside_s"] == pytest.approx(
        document["first"]["seconds"], rel=0.05
    )
    ms = [turn["ms"] for turn in document["first"]["details"]["longest"]]
    assert ms == sorted(ms, reverse=True)
    assert len(ms) == 10


def test_the_table_and_the_page_show_it(report, document):
    text = report.table()
    assert "6 of 6 answers are equal" in text
    assert "decode eager" in text
    assert "longest turns" in text
    drawn = page("traffic", document, report.drawings())
    assert drawn.count("<polyline") == 6
    assert "Where the time of the steady pass went [s]" in drawn


def test_a_shared_prefix_is_found_by_later_passes_and_not_by_the_check(checkpoint, monkeypatch):
    checks = []
    whole = bench_module.compare_passes

    def noted(llm, traffic, first, second):
        checks.append((first.num_cached_tokens, second.num_cached_tokens))
        return whole(llm, traffic, first, second)

    monkeypatch.setattr(bench_module, "compare_passes", noted)
    shape = replace(SHAPE, shared_prefix_len=32, input_len=Lengths.parse("5"))
    document = told(checkpoint, shape, page_size=4)
    ((first, second),) = checks
    assert first == second < 6 * 32
    assert [row["cached_tokens"] for row in document["passes"]] == [6 * 32] * 2
    assert document["traffic"]["input_tokens"] == 6 * 37


def test_requests_arrive_at_their_rate(checkpoint):
    shape = replace(SHAPE, request_rate=200.0)
    due_s = plan(checkpoint, shape).due_s
    assert list(due_s) == sorted(due_s)
    assert due_s == plan(checkpoint, shape).due_s
    assert due_s != plan(checkpoint, shape, seed=1).due_s
    assert 0 < due_s[0] < due_s[-1]
    document = told(checkpoint, shape)
    assert document["first"]["seconds"] > due_s[-1]
    assert document["traffic"]["request_rate"] == 200.0


def test_a_pass_counts_from_its_begin_and_waits_from_when_a_request_was_due(checkpoint):
    arrivals = plan(checkpoint, replace(SHAPE, request_rate=100.0)).arrivals(0)
    log = TurnLog()
    with LLM(knobs=Knobs(around_turn=log.around), **asked(checkpoint)) as llm:
        (left,) = llm.submit([[5, 6]])
        llm.engine.step()
        llm.abort(left.request.request_id)
        assert llm.engine.has_work, "what is in flight is not received by the pass"
        began = time.perf_counter()
        done = run_pass(llm, log, arrivals, name="a")
        wall_s = time.perf_counter() - began
    assert done.turns[0].landed is None
    assert arrivals[0].due_s <= done.turns[0].began_s <= done.seconds <= wall_s
    ttft_s, waited_s = [], 0.0
    for index, arrival in enumerate(arrivals):
        came_s = [turn.ended_s for turn in done.turns if f"a-{index}" in turn.receivers]
        ttft_s.append(came_s[0] - arrival.due_s)
        waited_s += came_s[-1] - came_s[0]
    assert done.ttft_s == pytest.approx(ttft_s)
    assert sum(done.gaps_s) == pytest.approx(waited_s)
    told_s = sum(row.seconds for row in time_by_kind(done))
    assert told_s == pytest.approx(sum(turn.seconds for turn in done.turns), rel=1e-6)


def test_sampled_answers_repeat(checkpoint):
    report = reported(checkpoint, replace(SHAPE, temperature=0.8, top_p=0.95, repeats=0))
    document = report.to_json()
    assert document["check"]["equal"] == 6
    assert document["steady"] is document["median_pass"] is None
    assert document["first"]["details"]["excess_ms"] is None
    assert "steady" not in report.table().partition("\n\n")[0]


def test_passes_have_tokens_of_their_own_and_a_seed_gives_the_same(checkpoint):
    traffic = plan(checkpoint, SHAPE)
    once, again, other = traffic.arrivals(0), traffic.arrivals(0, check=True), traffic.arrivals(1)
    assert [each.prompt_ids for each in once] == [each.prompt_ids for each in again]
    assert {each.salt for each in once} == {None} != {each.salt for each in again}
    assert not {each.prompt_ids for each in once} & {each.prompt_ids for each in other}
    assert plan(checkpoint, SHAPE).arrivals(0) == once
    assert plan(checkpoint, SHAPE, seed=1).arrivals(0) != once


def test_an_answer_that_differs_beyond_a_tie_is_no_result(checkpoint, monkeypatch):
    def wrong(llm, log, arrivals, *, name):
        done = run_pass(llm, log, arrivals, name=name)
        if name != "check":
            return done
        (answer,) = done.outputs[2].outputs
        token = (answer.token_ids[0] + 1) % 100
        answer = replace(answer, token_ids=(token, *answer.token_ids[1:]))
        outputs = list(done.outputs)
        outputs[2] = replace(outputs[2], outputs=(answer,))
        return replace(done, outputs=tuple(outputs))

    monkeypatch.setattr(bench_module, "run_pass", wrong)
    with pytest.raises(IntegrityError, match="tokens of request 2, sent twice"):
        bench_throughput(asked(checkpoint), SHAPE)


def test_a_count_that_is_wrong_is_no_result(checkpoint, monkeypatch):
    whole = TrafficShape.params
    monkeypatch.setattr(
        TrafficShape,
        "params",
        lambda *args, **how: replace(whole(*args, **how), stop=tuple("abcdefg")),
    )
    with pytest.raises(IntegrityError, match="output of 'first-0' must be"):
        bench_throughput(asked(checkpoint), SHAPE)


def test_ctrl_c_leaves_the_passes_that_ended(checkpoint, monkeypatch):
    def interrupted(llm, log, arrivals, *, name):
        if name == "steady 2":
            raise KeyboardInterrupt
        return run_pass(llm, log, arrivals, name=name)

    monkeypatch.setattr(bench_module, "run_pass", interrupted)
    document = told(checkpoint)
    assert document["interrupted"]
    assert len(document["passes"]) == 1


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lengths", [Lengths(least=16, mean=493, most=2048), USUAL_OUTPUT])
def test_lengths_have_their_mean_and_keep_their_bounds(lengths, seed):
    found = lengths.draw(512, random.Random(seed))
    assert sum(found) / 512 == pytest.approx(lengths.mean, abs=1.0)
    assert min(found) >= lengths.least
    assert max(found) <= lengths.most
    assert len(set(found)) > 200


def test_the_usual_lengths_are_scaled_to_the_context_and_asked_ones_are_not(checkpoint):
    traffic = plan(checkpoint, TrafficShape(num_requests=8), max_model_len=48)
    assert traffic.scaled_by == pytest.approx(48 / 3072)
    assert max(a + b for a, b in zip(traffic.input_lens, traffic.output_lens, strict=True)) <= 48
    shape = TrafficShape(num_requests=8, output_len=Lengths.parse("16"))
    traffic = plan(checkpoint, shape, max_model_len=48)
    assert set(traffic.output_lens) == {16}
    assert max(traffic.input_lens) <= 32
    for text in ("input_len", "output_len"):
        with pytest.raises(ConfigError, match="at most 48 tokens together, the context, got"):
            plan(checkpoint, TrafficShape(**{text: Lengths.parse("48")}), max_model_len=48)


def test_a_file_gives_prompts_and_lengths(checkpoint, tmp_path):
    talks = [(text_of(range(5, 9 + n)), text_of(range(7, 10 + n))) for n in range(8)]
    rows = [{"conversations": [{"from": "human", "value": a}, {"value": b}]} for a, b in talks]
    rows += [{"conversations": [{"value": "lonely"}]}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(rows))
    shape = TrafficShape(num_requests=5, dataset=path, repeats=1)
    traffic = plan(checkpoint, shape)
    assert all(
        out == own - 1 for own, out in zip(traffic.input_lens, traffic.output_lens, strict=True)
    )
    assert {each.salt for each in traffic.arrivals(1)} == {"pass 1"}
    document = told(checkpoint, shape)
    assert document["passes"][0]["cached_tokens"] == 0
    assert document["traffic"]["dataset"] == str(path)
    with pytest.raises(ConfigError, match="at least 9, got 8"):
        plan(checkpoint, replace(shape, num_requests=9))
    for text, got in (("{", "none"), ('[{"talk": 1}]', "another form"), ("[1]", "another form")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"got {got}"):
            plan(checkpoint, shape)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"repeats": -1}, "repeats must be at least 0, got -1"),
        ({"request_rate": 0.0}, "request_rate must be a finite number above 0"),
        ({"dataset": Path("a"), "shared_prefix_len": 3}, "dataset must be the only source"),
    ],
)
def test_shapes_that_cannot_be_sent_are_refused(words, text):
    with pytest.raises(ConfigError, match=text):
        TrafficShape(**words)


@pytest.mark.parametrize("text", ["", "1:2", "a", "16:8:32", "0"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="length"):
        Lengths.parse(text)


def test_sampling_nobody_knows_is_refused():
    with pytest.raises(RequestError, match="temperature"):
        TrafficShape(temperature=-1.0)


def turn(seconds, landed=None, launched=None):
    return TimedTurn(seconds=seconds, landed=landed, launched=launched)


def step(tokens, run=RunKind.GRAPH, kind=StepKind.DECODE):
    return StepFacts(kind, run, tokens, tokens, tokens, tokens)


def made(*turns):
    return TrafficPass(turns=turns, seconds=1.0, outputs=(), ttft_s=(), gaps_s=())


def test_the_excess_of_a_turn_is_over_steady_turns_of_the_same_steps():
    steady = Steady(
        [
            made(turn(0.010, step(8), step(8)), turn(0.500, step(8), step(8, RunKind.CAPTURE))),
            made(turn(0.012, step(8), step(8)), turn(0.030, step(64), step(64))),
        ]
    )
    slow = turn(0.111, step(8, RunKind.EAGER), step(8, RunKind.EAGER))
    assert steady.excess_s([slow]) == pytest.approx([0.1])
    assert steady.excess_s([turn(0.001, step(8), step(8))]) == [0.0]
    assert steady.excess_s([turn(0.040, step(60), step(60))]) == pytest.approx([0.010])
    # Another kind is taken only where there is none of its own.
    mixed = Steady([made(turn(0.02, step(8), step(8)), turn(0.2, step(500, kind=StepKind.MIXED)))])
    assert mixed.excess_s([turn(0.03, step(400), step(400))]) == pytest.approx([0.01])


def test_medians_and_percentiles():
    rows = [{"a": 1.0, "b": {"c": 2.0}, "d": None}, {"a": 3.0, "b": {"c": 2.0}, "d": 1.0}]
    assert over_passes(rows) == {
        "a": {"median": 2.0, "spread": 1.0},
        "b": {"c": {"median": 2.0, "spread": 0.0}},
        "d": None,
    }
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]


def test_one_token_each_has_no_gaps_and_no_decode_rate(checkpoint):
    report = reported(checkpoint, replace(SHAPE, output_len=Lengths.parse("1"), repeats=1))
    document = report.to_json()
    assert document["first"]["inter_token_ms"] is None
    assert document["first"]["decode_tok_s"] is None
    assert "first" in report.table()


def test_the_decode_rate_is_that_of_all_decoding_together(checkpoint):
    shape = replace(SHAPE, num_requests=4, output_len=Lengths.parse("20"), repeats=1)
    document = told(checkpoint, shape)
    row = document["passes"][0]
    assert row["decode_tok_s"] > row["output_tok_s"]


def test_the_command_line_ends_with_the_document(checkpoint):
    words = ["bench", "throughput", str(checkpoint.folder), "--threads", "1"]
    words += ["--num-requests", "3", "--repeats", "1"]
    words += ["--max-num-seqs", "4", "--output-len", "3", "--input-len"]
    done = CliRunner().invoke(app, [*words, "2:5:9"])
    assert done.exit_code == 0, done.output
    out = done.stdout
    jsonschema.validate(json.loads(out.splitlines()[-1]), json.loads(SCHEMA.read_text()))
    assert "3 requests at once, prompts 2-9" in out
    refused = CliRunner().invoke(app, [*words, "9:5:2"])
    assert refused.exit_code == 2
    assert "lengths must be 1 <= LEAST <= MEAN <= MOST" in refused.stderr
