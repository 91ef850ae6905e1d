"""The benchmark of speculation: what it counts, what it refuses to tell, what it calls forced."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from llm_cases import Checkpoint

from paceline.bench import speculative as bench_module
from paceline.bench.latency import bench_latency
from paceline.bench.latency_shape import LatencyShape
from paceline.bench.paired_runs import speed_up
from paceline.bench.speculative import bench_speculative
from paceline.bench.speculative_shape import SpeculativeShape
from paceline.cli.app import app
from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.plan.speculation import FORCED
from paceline.proof.lossless.prompt_set import NamedPrompt, read_prompts
from paceline.runner.program import StepProgram

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
SHAPE = SpeculativeShape(
    prompts=(
        NamedPrompt(name="loop 1", kind="loop", text="acadacadacadacad"),
        NamedPrompt(name="other 2", kind="other", text="bebiqubyfafeaxbccb"),
    ),
    output_len=20,
    repeats=2,
)


def validate(document, name):
    jsonschema.validate(document, json.loads((SCHEMAS / f"{name}.json").read_text()))


def asked(checkpoint: Checkpoint, **options):
    return {
        "model": str(checkpoint.folder),
        "threads": 1,
        "speculative_algorithm": "NGRAM",
        "speculative_num_steps": 3,
        **options,
    }


def test_every_token_behind_the_first_is_of_a_round(checkpoint):
    report = bench_speculative(asked(checkpoint), SHAPE)
    document = report.to_json()
    validate(document, "bench_speculative")
    assert document["texts"] == {"equal": 2, "tie": 0}
    assert document["forced"] is None
    acceptance = document["acceptance"]
    emitted = acceptance["rounds"] * acceptance["mean_tokens_per_round"]
    assert emitted == pytest.approx(2 * (SHAPE.output_len - 1))
    assert acceptance["mean_tokens_per_round"] == pytest.approx(
        1 + sum(acceptance["accepted_by_position"])
    )
    text = report.table()
    assert "speed-up" in text
    assert "texts: 2 equal, 0 tie" in text
    assert "FORCED" not in text


def test_a_request_says_which_tokens_were_drafts(checkpoint):
    with LLM(**asked(checkpoint)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        (output,) = llm.generate([SHAPE.prompts[0].text], params)
    (completion,), metrics = output.outputs, output.metrics
    assert len(completion.is_drafted) == len(completion.token_ids) == 20
    assert not completion.is_drafted[0]
    assert sum(completion.is_drafted) == sum(metrics.accepted_by_position) > 0


def test_forced_acceptance_is_named_in_every_line_and_compares_no_text(checkpoint):
    report = bench_speculative(asked(checkpoint, force_accept_len=2.0), SHAPE)
    document = report.to_json()
    validate(document, "bench_speculative")
    assert document["texts"] is None
    assert document["forced"] == 2.0
    assert document["acceptance"]["mean_tokens_per_round"] == pytest.approx(2.0, abs=0.2)
    titles = [bars.title for bars in report.drawings()]
    lines = report.table().splitlines() + titles
    assert all(line.startswith("FORCED to 2 tokens per round: ") for line in lines)
    assert lines[-len(titles) - 1].endswith("texts are wrong and were not compared")


def test_an_engine_of_forced_acceptance_says_so(checkpoint):
    with LLM(**asked(checkpoint, force_accept_len=2.0)) as llm:
        told = {event["reason"]: event["detail"] for event in llm.report()["events"]}
    assert told[FORCED].startswith("FORCED to 2 tokens per round: ")


def test_no_speed_up_is_told_of_a_wrong_text(checkpoint, monkeypatch):
    right = StepProgram._commit

    def unverified(self, sampled, tree):
        if tree is not None:
            sampled.token_ids.view(tree.tokens.shape)[:, 0] = tree.tokens[:, 1]
        return right(self, sampled, tree)

    monkeypatch.setattr(StepProgram, "_commit", unverified)
    with pytest.raises(IntegrityError, match="with speculation must be that of plain decoding"):
        bench_speculative(asked(checkpoint), SHAPE)


def test_an_engine_that_may_not_draft_is_refused(checkpoint):
    off = {"model": str(checkpoint.folder), "speculative_algorithm": "off"}
    with pytest.raises(ConfigError, match="speculative_algorithm must be a drafter, got off"):
        bench_speculative(off, SHAPE)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"output_len": 1}, "output_len must be at least 2, got 1"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"prompts": SHAPE.prompts[:1]}, "prompts must be at least 2, got 1"),
    ],
)
def test_shapes_that_cannot_be_timed_are_refused(counts, text):
    with pytest.raises(ConfigError, match=text):
        replace(SHAPE, **counts)


def test_the_speed_up_is_a_geometric_mean_with_an_interval_around_it():
    assert asdict(speed_up([2.0, 2.0])) == pytest.approx(
        {"mean": 2.0, "low": 2.0, "high": 2.0, "confidence": 0.95}
    )
    found = speed_up([0.5, 1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(2**0.5)
    assert 0.5 < found.low < found.mean < found.high < 4.0
    assert speed_up([0.5, 1.0, 2.0, 4.0]) == found


def test_the_command_line_ends_with_the_document(checkpoint, tmp_path):
    prompts = tmp_path / "prompts.toml"
    rows = [f'[[prompt]]\nkind = "{p.kind}"\ntext = "{p.text}"\n' for p in SHAPE.prompts]
    prompts.write_text("".join(rows))
    words = ["bench", "speculative", str(checkpoint.folder), "--threads", "1"]
    words += ["--prompts", str(prompts)]
    words += ["--output-len", "6", "--repeats", "1", "--speculative-algorithm"]
    done = CliRunner().invoke(app, [*words, "NGRAM"])
    assert done.exit_code == 0, done.output
    out = done.stdout
    validate(json.loads(out.splitlines()[-1]), "bench_speculative")
    assert "mean_tokens_per_round" in out
    assert CliRunner().invoke(app, [*words, "off"]).exit_code == 2


def test_latency_names_the_drafter_and_what_was_forced(checkpoint):
    shape = LatencyShape(batch_sizes=(1, 2), input_len=9, output_len=13)
    options = asked(checkpoint, force_accept_len=3.0)
    report = bench_latency(options, shape)
    document = report.to_json()
    validate(document, "bench_latency")
    assert document["speculation"]["forced_tokens_per_round"] == 3.0
    assert [row["mean_tokens_per_round"] for row in document["results"]] == pytest.approx(
        [3.0, 3.0], abs=0.3
    )
    text = report.table()
    assert "speculation NGRAM, 3 steps, topk 1, 4 tokens verified: 3" in text
    assert "FORCED to 3 tokens per round, the texts are wrong" in text


def test_our_prompts_are_of_every_kind():
    prompts = read_prompts()
    assert {each.kind for each in prompts} == {"code", "prose", "json", "repetition"}
    assert 8 <= len(prompts) <= 16
    assert len({each.name for each in prompts}) == len(prompts)
    assert not any(each.text.startswith("\n") for each in prompts)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("[[prompt]", "none (Expected"),
        ("prompt = []", "the keys ['prompt']"),
        ("x = 1", "the keys ['x']"),
        ('[[prompt]]\ntext = "a"', "prompt 1 with other keys"),
        ('[[prompt]]\nkind = "a"\ntext = ""', "prompt 1 with a value that is empty or no string"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, text, got):
    path = tmp_path / "prompts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_prompts(str(path))
    assert f"got {got}" in str(caught.value)


def test_ctrl_c_leaves_the_prompts_that_were_timed(checkpoint, monkeypatch):
    timed, whole = [], bench_module.in_turns

    def interrupted(*engines, **how):
        if timed:
            raise KeyboardInterrupt
        timed.append(whole(*engines, **how))
        return timed[0]

    monkeypatch.setattr(bench_module, "in_turns", interrupted)
    told = bench_module.bench_speculative(asked(checkpoint), SHAPE).to_json()
    validate(told, "bench_speculative")
    assert [row["prompt"] for row in told["prompts"]] == [SHAPE.prompts[0].name]
    assert told["texts"] == {"equal": 1, "tie": 0}
    assert told["interrupted"]
