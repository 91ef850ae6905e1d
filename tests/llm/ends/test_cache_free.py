"""Vectors of decoders whose steps hold every text whole: nothing is written for later steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from box_cases import boxed, replayed_as_it_was, written
from classifiers import make_cross_encoder
from embedders import Embedder, assert_vectors
from llm_cases import assert_idle, make_llm, random_prompts

from paceline.core.errors import ConfigError
from paceline.core.gpus import gpu_by_name
from paceline.core.model.config import Heads, LayerSpec, ModelConfig, RowPart
from paceline.core.model.lookback import Chunk
from paceline.core.modes import End, Pooling
from paceline.core.options.engine_options import EngineOptions
from paceline.llm.box.replay import replay
from paceline.plan.cache_free import without_cache
from paceline.plan.explain import explain_model, show
from paceline.plan.machine import local_device

CONTEXT = 128
LENGTHS = (40, 1, 9, 33, 17, CONTEXT)
WAYS: dict[str, dict[str, Any]] = {
    "unasked": {},
    "asked": {"enable_prefix_cache": False, "chunked_prefill_size": CONTEXT},
    "few at a time": {"max_num_batched_tokens": CONTEXT, "max_num_seqs": 3},
    "eager": {"enforce_eager": True},
    "graphs": {"cuda_graph_max_tokens": 256},
    "sanitized": {"sanitize": True},
}
WHY = "chosen: a step holds the longest text: nothing is written for later ones"


@pytest.mark.parametrize("way", WAYS)
def test_vectors_are_those_of_transformers(pooled: tuple[Pooling, Embedder], way: str) -> None:
    pooling, embedder = pooled
    prompts = random_prompts(LENGTHS)
    wanted = [embedder.vector(ids, pooling) for ids in prompts]
    with make_llm(embedder, **WAYS[way]) as llm:
        assert not llm.prepared.groups
        for _ in range(2):
            found = llm.embed(prompts)
            assert_vectors(found, wanted)
            assert not any(each.cached_tokens for each in found)
        assert_idle(llm)
        assert llm._live.runner.graphs_captured or way != "graphs"


def test_nothing_is_written_or_read_but_the_step(embedder: Embedder) -> None:
    """No layer is in a cache group, so there is no pool and no page."""
    [prompt] = random_prompts([100])
    with make_llm(embedder) as llm:
        parts = llm._live.runner.parts
        assert (parts.device_pools, parts.buffers.page_tables, llm.prepared.groups) == ((), (), ())
        assert set(parts.layers) == {None}
        assert llm.prepared.fit.kv_bytes == 0
        assert_vectors(llm.embed([prompt]), [embedder.vector(prompt, Pooling.LAST)])
        told = llm.prepared.resolution.to_json()
    shown = explain_model({"model": str(embedder.folder), "device": "cpu"}, gpu=None)
    assert told["enable_prefix_cache"] == {"value": False, "origin": WHY}
    assert told["attention_backend"]["origin"] == "chosen: no layer attends over a cache"
    assert shown.resolution.to_json()["enable_prefix_cache"] == told["enable_prefix_cache"]


@pytest.mark.parametrize(
    "asked",
    [
        {"enable_prefix_cache": True},
        {"chunked_prefill_size": CONTEXT - 1},
        {"max_num_batched_tokens": CONTEXT - 1},
        {"page_size": 16},
        {"kv_cache_bytes": 1 << 20},
        {"kv_cache_dtype": "float32"},
        {"attention_backend": "torch"},
        {"prompt_blocks": True},
    ],
    ids=str,
)
def test_who_asks_something_of_a_cache_has_one(embedder: Embedder, asked: dict[str, Any]) -> None:
    plan = explain_model({"model": str(embedder.folder), "device": "cpu"} | asked, gpu=None)
    assert len(plan.config.heads) == 1
    assert plan.fit.kv_bytes


def test_a_text_longer_than_a_step_has_a_cache_unless_its_end_is_asked(embedder: Embedder) -> None:
    """A shorter context is held by a step that a longer one was not."""
    step = {"model": str(embedder.folder), "device": "cpu", "max_num_batched_tokens": 64}
    assert explain_model(step, gpu=None).fit.kv_bytes
    assert not explain_model(step | {"max_model_len": 64}, gpu=None).fit.kv_bytes


def test_pairs_share_their_query_unless_that_is_asked_off(tmp_path: Path) -> None:
    model = {"model": str(make_cross_encoder("qwen3", tmp_path).folder), "device": "cpu"}
    assert explain_model(model, gpu=None).fit.kv_bytes
    assert not explain_model(model | {"enable_prefix_cache": False}, gpu=None).fit.kv_bytes


def test_a_record_is_replayed_without_a_cache(embedder: Embedder, tmp_path: Path) -> None:
    with boxed(embedder, tmp_path) as llm:
        llm.embed(random_prompts(LENGTHS))
        llm.keep_stuck("nowhere")
    [record] = written(tmp_path)
    assert replayed_as_it_was(record, sanitize=True).num_restored == 0
    assert replay(record, {"dtype": "bfloat16", "attention_backend": "auto"}).end.endswith("ended")
    for asked in ({"attention_backend": "torch"}, {"enable_prefix_cache": True}):
        [(name, value)] = asked.items()
        with pytest.raises(
            ConfigError, match=rf"^{name} must be left out: .*no KV cache.*, got {value}; leave it"
        ):
            replay(record, asked)


LAYER = LayerSpec(heads=Heads(4, 2, 64, 64))
PART = RowPart("state", (4,))
SHAPE = ModelConfig(
    model_type="made-up",
    vocab_size=32,
    hidden_size=256,
    intermediate_size=512,
    max_position=1024,
    rms_norm_eps=1e-6,
    layers=(LAYER, LAYER),
    hidden_act="silu",
    tie_word_embeddings=True,
    eos_token_ids=(1,),
    dtype="bfloat16",
    ends=frozenset({End.POOL}),
    pooling=Pooling.LAST,
)


@pytest.mark.parametrize(
    "change",
    [
        {"sinks": True},
        {"window": Chunk(8)},
        {"reads_encoder": True},
        {"heads": Heads(4, 1, 72, 64, v_in_k=True)},
        {"mixer": "gdn", "heads": Heads(0, 0, 0, 0), "state": (PART,)},
        {"state": (PART,)},
    ],
    ids=str,
)
def test_layers_that_read_a_pool_keep_it(change: dict[str, Any]) -> None:
    """Latents above all: absorbed, they have no keys but those of the pool."""
    device, asked = local_device("cpu"), {"enable_prefix_cache": False}
    options = EngineOptions(enable_prefix_cache=False)
    assert all(layer.cache_free for layer in without_cache(SHAPE, asked, options, device).layers)
    window = replace(SHAPE, layers=(replace(LAYER, window=8, soft_cap=50.0), LAYER))
    assert not without_cache(window, asked, options, device).heads
    other = replace(SHAPE, layers=(LAYER, replace(LAYER, **change)))
    assert without_cache(other, asked, options, device) is other
    ranks = EngineOptions(enable_prefix_cache=False, tensor_parallel_size=2)
    assert without_cache(SHAPE, asked, ranks, device) is SHAPE
    generating = replace(SHAPE, ends=SHAPE.ends | {End.GENERATE})
    assert without_cache(generating, asked, options, device) is generating


@pytest.mark.parametrize(
    ("length", "asked", "gpu", "is_free"),
    [
        (1024, {}, None, True),
        (1025, {}, None, False),
        (1025, {"enable_prefix_cache": False}, None, False),
        (16384, {}, "h200", True),
        (16385, {}, "h200", False),
        (32768, {"enable_prefix_cache": False}, "h200", True),
        (32769, {"enable_prefix_cache": False}, "h200", False),
        (16384, {"enable_prefix_cache": False, "gpu_memory_utilization": 0.3}, "h200", True),
        (16385, {"enable_prefix_cache": False, "gpu_memory_utilization": 0.3}, "h200", False),
        (32768, {"enable_prefix_cache": False, "max_num_batched_tokens": 32767}, "h200", False),
    ],
)
def test_how_long_a_text_may_be(
    length: int, asked: dict[str, Any], gpu: str | None, is_free: bool
) -> None:
    device = local_device("cpu") if gpu is None else gpu_by_name(gpu)
    shape = replace(SHAPE, max_position=length)
    assert without_cache(shape, asked, EngineOptions(**asked), device).reads_whole is is_free


def test_explain_names_the_heads_of_layers_that_cache_nothing(embedder: Embedder) -> None:
    plan = explain_model({"model": str(embedder.folder), "device": "cpu"}, gpu=None)
    assert "2 layers, 5/1 heads of 24, weights" in show(plan).splitlines()[0]
