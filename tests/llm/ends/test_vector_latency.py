"""`bench latency` of a model that makes vectors: its document, and what it refuses."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from classifiers import make_cross_encoder
from embedders import make_embedder

from paceline.bench.latency import bench_latency
from paceline.bench.latency_shape import LatencyShape
from paceline.bench.vector_latency import seen_pairs, text_flops
from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.model.config import LayerSpec
from paceline.core.modes import End
from paceline.core.options.engine_options import EngineOptions
from paceline.llm.ends.vectors import EmbeddingOutput
from paceline.llm.llm import LLM
from paceline.plan.target import find_target

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


def test_batches_of_pairs_are_timed(tmp_path: Path) -> None:
    encoder = make_cross_encoder("bert", tmp_path)
    shape = LatencyShape(batch_sizes=(2,), input_len=33, output_len=2)
    report = bench_latency({"model": str(encoder.folder), "threads": 1}, shape)
    document = json.loads(json.dumps(report.to_json()))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    [row] = document["results"]
    assert (row["batch_size"], row["input_len"], row["of_limit"]) == (2, 33, None)
    assert report.table().splitlines()[-1].endswith(" -")


@pytest.mark.parametrize("window", [None, 1, 3, 9, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_those_that_see_one_another(window: int | None, causal: bool) -> None:
    spec, most = LayerSpec(window=window, causal=causal), window or 99
    distances = [p - j for p in range(9) for j in range(9)]
    seen = [d for d in distances if abs(d) < most and (d >= 0 or not causal)]
    assert seen_pairs(spec, 9) == len(seen)


def test_shapes_of_embedders_are_shipped_and_their_products_counted() -> None:
    """BERT-base has 85.1 million numbers in its layers, of which 84.9 are matrices; of
    Qwen3-Embedding-0.6B 440.4."""
    for name, millions in (("bert-base", 84.9), ("qwen3-embedding-0.6b", 440.4)):
        config = find_target(EngineOptions(model=name, device="cpu"), weights=False).config
        assert config.ends == {End.POOL}
        of_one = text_flops(config, 1)
        own = sum(4.0 * s.heads.num_heads * s.heads.head_dim for s in config.layers)
        assert of_one is not None
        assert (of_one - own) / 2e6 == pytest.approx(millions, abs=0.1)


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
            EmbeddingOutput(vector=next(vectors), prompt_token_ids=(4,), cached_tokens=0)
        ],
    )
    embedder = make_embedder(tmp_path)
    shape = LatencyShape(batch_sizes=(1,), input_len=8, output_len=2)
    with pytest.raises(IntegrityError, match=r"^what is made twice of one text must be equal"):
        bench_latency({"model": str(embedder.folder), "threads": 1}, shape)
