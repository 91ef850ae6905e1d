"""The verbs on the real engine and the bundled model."""

import json
from pathlib import Path

import jsonschema
from click.testing import CliRunner

from paceline.cli.app import app

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def run(*words, stdin=None):
    done = CliRunner().invoke(app, [*words, "--threads", "1"], input=stdin)
    assert done.exit_code == 0, done.output
    return done


def last_document(done, name):
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, json.loads((SCHEMAS / f"{name}.json").read_text()))
    return document


def test_streamed_text_equals_the_json_text():
    words = ["generate", "--prompt", "def add(a, b):", "--max-tokens", "12", "--enforce-eager"]
    streamed = run(*words).stdout
    document = last_document(run(*words, "--json"), "generate")
    assert streamed == document["text"] + "\n"
    assert document["metrics"]["output_tokens"] == len(document["token_ids"])


def test_bench_latency_ends_with_its_document():
    shape = ["--batch-size", "1,2", "--input-len", "24", "--output-len", "6"]
    done = run("bench", "latency", *shape)
    document = last_document(done, "bench_latency")
    assert [row["batch_size"] for row in document["results"]] == [1, 2]
    assert document["kernel_cache"] in {"none", "warm", "cold"}
    assert 0 < document["boot_s"] < document["first_token_s"]
    assert "decode tok/s" in done.stdout


def test_bench_throughput_ends_with_its_document(tmp_path):
    words = ["--num-requests", "3", "--input-len", "4:9:16", "--output-len", "4", "--repeats", "1"]
    path = tmp_path / "page.html"
    done = run("bench", "throughput", *words, "--html", str(path))
    document = last_document(done, "bench_throughput")
    assert document["check"]["equal"] == 3
    assert len(document["passes"]) == 1
    assert "output tok/s" in done.stdout
    assert "<h1>paceline bench throughput on " in path.read_text()


def test_chat_answers_every_line():
    done = run(
        "chat", "--max-tokens", "4", "--enforce-eager", stdin="x = 1\n/reset\ny = 2\n/exit\n"
    )
    assert done.stderr.count("4 tokens,") == 2
