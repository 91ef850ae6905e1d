"""The command that `paceline explain` suggests is run as it is printed."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli.app import app
from paceline.models.locate import locate
from paceline.plan import target
from paceline.plan.machine import cpu_facts
from paceline.plan.memory.suggestion import flag_words

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "explain.json"
MIB = 1 << 20


def run(*words, engine=None):
    return CliRunner().invoke(app, list(words), obj=engine)


def suggestion(*words):
    """The words after `paceline` of the first command that explain prints."""
    done = run("explain", *words)
    assert done.exit_code == 2
    lines = done.stdout.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("nearest command that fits")]
    return shlex.split(lines[at + 1])[1:]


@pytest.fixture
def small_cpu(monkeypatch):
    """This machine, pretending to have little memory."""
    facts = replace(cpu_facts(), total_bytes=600 * MIB, free_bytes=250 * MIB)
    monkeypatch.setattr(target, "local_device", lambda device_type=None: facts)
    return facts


ASKS = {
    "a tight cache": "--device cpu --max-model-len 1024 --kv-cache-memory-bytes 800000",
    "too many requests": "--device cpu --dtype float32 --max-num-seqs 4000",
    "too large a cache": "--device cpu --max-num-seqs 4 --kv-cache-memory-bytes 400000000",
}


@pytest.mark.parametrize("asked", ASKS.values(), ids=ASKS)
def test_the_suggested_command_generates_tokens(asked, small_cpu):
    words = suggestion(*asked.split())
    assert words[0] == "generate"
    done = run(*words, "--max-tokens", "3", "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout.splitlines()[-1])["token_ids"]) == 3


def test_who_is_refused_is_told_the_same_command(small_cpu):
    asked = ASKS["a tight cache"].split()
    refused = run("generate", *asked, "--prompt", "def f(")
    assert refused.exit_code == 2
    assert shlex.join(suggestion(*asked)[1:-2]) in refused.stderr


CACHE = ("--kv-cache-memory-bytes", "900000000")


@pytest.fixture
def shallow(tmp_path):
    """Two layers of a large model, which are rehearsed sooner than all."""
    config = locate("llama-3.1-8b").config | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_only_what_was_asked_and_what_changes_is_suggested(shallow):
    words = suggestion(shallow, "--gpu", "l4", "--max-model-len", "131072", *CACHE)
    assert words[:4] == ["generate", "--model", shallow, "--max-model-len"]
    assert 256 <= int(words[4]) < 131072
    assert words[5:] == [*CACHE, "--prompt", "Hello"]


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu", "l4", "--max-model-len", "131072", *CACHE],
        ["--gpu", "rtx-3090", "--max-num-batched-tokens", "9000000"],
        ["--gpu", "h200"],
    ],
)
def test_the_document_of_every_outcome_fits_its_schema(words, shallow):
    done = run("explain", shallow, *words, "--json")
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert (document["nearest"] is None) == document["fits"]


def test_suggested_flags_ask_the_engine_for_the_same():
    asked = {
        "model": "x y",
        "max_model_len": 64,
        "gpu_memory_utilization": 0.91,
        "kv_cache_bytes": 1000,
        "kv_cache_dtype": "fp8_e4m3",
        "enable_prefix_cache": False,
        "enforce_eager": True,
        "overlap": False,
        "seed": -1,
        "threads": 2,
    }
    engine = FakeEngine()
    assert run("generate", *flag_words(asked), "--prompt", "p", engine=engine).exit_code == 0
    assert engine.asked == asked
