"""`bench latency` of a model that makes vectors: its document, and what it refuses."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from embedders import make_embedder

from paceline.bench.latency import bench_latency
from paceline.bench.latency_shape import LatencyShape
from paceline.core.errors import ConfigError, IntegrityError
from paceline.llm.ends.vectors import Embedding
from paceline.llm.llm import LLM

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "bench_latency_vectors.json"


def test_batches_of_an_embedder_are_timed(tmp_path: Path) -> None:
    embedder = make_embedder(tmp_path)
    shape = LatencyShape(batch_sizes=(1, 3), input_len=128, output_len=64)  # the whole context
    report = bench_latency({"model": str(embedder.folder), "threads": 1}, shape)
    document = json.loads(json.dumps(report.to_json()))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert [(row["batch_size"], row["input_len"]) for row in document["results"]] == [
        (1, 128),
        (3, 128),
    ]
    assert all(row["tok_s"] > 0 for row in document["results"])
    assert "tok/s" in report.table()
    assert [len(each.rows) for each in report.drawings()] == [2, 2]


def test_a_text_beyond_the_context_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    embedder = make_embedder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shape = LatencyShape(batch_sizes=(1,), input_len=129, output_len=2)
    with pytest.raises(ConfigError, match=r"^input_len must be at most 128 tokens, the context"):
        bench_latency({"model": str(embedder.folder)}, shape)


def test_vectors_that_do_not_repeat_are_not_timed(tmp_path: Path, monkeypatch) -> None:
    vectors = iter(np.eye(2, dtype=np.float32))
    monkeypatch.setattr(
        LLM,
        "embed",
        lambda *args, **kwargs: [
            Embedding(vector=next(vectors), prompt_token_ids=(4,), cached_tokens=0)
        ],
    )
    embedder = make_embedder(tmp_path)
    shape = LatencyShape(batch_sizes=(1,), input_len=8, output_len=2)
    with pytest.raises(IntegrityError, match=r"^two vectors of one text must be equal"):
        bench_latency({"model": str(embedder.folder), "threads": 1}, shape)
