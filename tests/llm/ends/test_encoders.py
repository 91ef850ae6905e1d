"""Vectors of encoders: tokens see one another in both directions, and a step has no cache."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from box_cases import boxed, replayed_as_it_was, written
from embedders import Embedder, assert_vectors, write_modules
from llm_cases import assert_idle, make_llm, random_prompts, save_tokenizer, text_of

from paceline.core.errors import ConfigError, ModelError, RequestError
from paceline.core.modes import Pooling
from paceline.layers import attention as attention_layer
from paceline.llm.box.replay import replay
from paceline.plan.explain import explain_model

CONTEXT = 128
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"max_position_embeddings": CONTEXT, "pad_token_id": 0}),
    "bert-tanh": (
        "Bert",
        {"max_position_embeddings": CONTEXT, "pad_token_id": 0, "hidden_act": "gelu_new"},
    ),
    "roberta": ("Roberta", {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1}),
    "modernbert-windows": (
        "ModernBert",
        {"max_position_embeddings": CONTEXT, "pad_token_id": 0, "local_attention": 8},
    ),
    "modernbert-biases": (
        "ModernBert",
        {"max_position_embeddings": CONTEXT, "pad_token_id": 0, "local_attention": 6}
        | {"norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
}
LENGTHS = (40, 1, 9, 33, CONTEXT, 16)
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "few at a time": {"max_num_batched_tokens": CONTEXT, "max_num_seqs": 2},
    "graphs": {"cuda_graph_max_tokens": 2 * CONTEXT},
    "sanitized": {"sanitize": True},
}


def make_encoder(case: str, folder: Path, *, head: str = "Model", **more: Any) -> Embedder:
    """head: of the class that writes the checkpoint; the body is what makes vectors."""
    family, settings = CASES[case]
    config = getattr(transformers, f"{family}Config")(**SIZES | settings | more)
    config._attn_implementation = "eager"
    torch.manual_seed(zlib.crc32(case.encode()))
    whole = getattr(transformers, f"{family}{head}")(config).eval().requires_grad_(False)
    for parameter in whole.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    whole.save_pretrained(folder)
    save_tokenizer(folder)
    return Embedder(folder, whole if head == "Model" else whole.base_model)


@pytest.fixture(scope="module", params=CASES)
def encoder(request, tmp_path_factory) -> Embedder:
    return make_encoder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("way", WAYS)
def test_vectors_are_those_of_transformers(encoder: Embedder, way: str) -> None:
    prompts = random_prompts(LENGTHS)
    wanted = [encoder.vector(ids, Pooling.MEAN) for ids in prompts]
    with make_llm(encoder, **WAYS[way]) as llm:
        for _ in range(3):
            assert_vectors(llm.embed(prompts), wanted)
        assert_idle(llm)
        if way == "graphs":
            assert llm._live.runner.graphs_captured


def test_nothing_is_written_or_read_but_the_step(encoder: Embedder) -> None:
    """No layer is in a cache group, so there is no pool and no page; a prompt is found nowhere."""
    [prompt] = random_prompts([100])
    with make_llm(encoder) as llm:
        parts = llm._live.runner.parts
        assert (parts.device_pools, parts.buffers.page_tables, llm.prepared.groups) == ((), (), ())
        assert set(parts.layers) == {None}
        assert llm.prepared.fit.kv_bytes == 0
        shown = llm.prepared.resolution.to_json()
        assert shown["enable_prefix_cache"] == {
            "value": False,
            "origin": "chosen: the model caches nothing",
        }
        assert shown["attention_backend"]["origin"] == "chosen: no layer attends over a cache"
        assert [llm.embed([prompt])[0].cached_tokens for _ in range(2)] == [0, 0]


def test_a_text_is_whole_in_its_step(encoder: Embedder, monkeypatch) -> None:
    """Whatever room is left beside others."""
    lengths: list[int] = []
    with make_llm(encoder, max_num_batched_tokens=CONTEXT) as llm:
        runner = llm._live.runner
        launch = runner.launch
        monkeypatch.setattr(
            llm.engine._runner,
            "launch",
            lambda step: (lengths.extend(step.layout.extend_lens), launch(step))[1],
        )
        llm.embed(random_prompts(LENGTHS))
    assert sorted(lengths) == sorted(LENGTHS)


@pytest.mark.parametrize("pooling", Pooling)
def test_pooling_is_what_the_files_say(tmp_path: Path, pooling: Pooling) -> None:
    encoder, prompts = make_encoder("bert", tmp_path), random_prompts((9, 20))
    write_modules(tmp_path, pooling, width=48)
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(prompts), [encoder.vector(ids, pooling) for ids in prompts])
        assert llm.prepared.config.normalizes


def test_pooling_is_read_from_the_folder_that_modules_json_names(tmp_path: Path) -> None:
    """And not from one that another layout would have."""
    encoder, prompts = make_encoder("bert", tmp_path), random_prompts((9, 20))
    write_modules(tmp_path, Pooling.CLS, width=48)
    (tmp_path / "1_Pooling").rename(tmp_path / "3_Pooling")
    write_modules(tmp_path, Pooling.MEAN, width=48)
    modules = (tmp_path / "modules.json").read_text()
    (tmp_path / "modules.json").write_text(modules.replace("1_Pooling", "3_Pooling"))
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(prompts), [encoder.vector(ids, Pooling.CLS) for ids in prompts])


@pytest.mark.parametrize("case", ["bert", "roberta", "modernbert-windows"])
def test_the_head_of_a_masked_language_model_is_not_read(tmp_path: Path, case: str) -> None:
    encoder, prompts = make_encoder(case, tmp_path, head="ForMaskedLM"), random_prompts((9, 20))
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(prompts), [encoder.vector(p, Pooling.MEAN) for p in prompts])


@pytest.mark.parametrize("window", [2, 8, 300])
def test_a_window_has_both_its_ends(tmp_path: Path, window: int) -> None:
    """local_attention is a width, of which half lies on each side."""
    encoder = make_encoder("modernbert-windows", tmp_path, local_attention=window)
    prompts = random_prompts((30, 5))
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(prompts), [encoder.vector(p, Pooling.MEAN) for p in prompts])


def test_modernbert_reads_what_transformers_reads(tmp_path: Path) -> None:
    """Its own bases of rope and not Gemma's, and half a window where the file says that."""
    encoder, prompts = make_encoder("modernbert-windows", tmp_path), random_prompts((30, 5))
    told = json.loads((tmp_path / "config.json").read_text())
    del told["rope_parameters"]
    told |= {"global_rope_theta": 700.0, "local_rope_theta": 90.0, "sliding_window": 3}
    told |= {"rope_theta": 11.0, "rope_local_base_freq": 13.0}
    (tmp_path / "config.json").write_text(json.dumps(told))
    theirs = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    encoder = Embedder(tmp_path, theirs)
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(prompts), [encoder.vector(p, Pooling.MEAN) for p in prompts])


def test_a_causal_step_would_show(tmp_path: Path, monkeypatch) -> None:
    """What these tests would find: attention that looks back alone, as some engines' fallbacks."""
    encoder, prompts = make_encoder("bert", tmp_path), random_prompts((9,))
    real = attention_layer.ragged_attention
    monkeypatch.setattr(
        attention_layer, "ragged_attention", lambda *a, **k: real(*a, **k | {"causal": True})
    )
    with make_llm(encoder) as llm, pytest.raises(AssertionError, match="vectors differ"):
        assert_vectors(llm.embed(prompts), [encoder.vector(p, Pooling.MEAN) for p in prompts])


def test_what_an_encoder_cannot_do_is_refused(tmp_path: Path) -> None:
    encoder = make_encoder("roberta", tmp_path)
    with make_llm(encoder) as llm:
        with pytest.raises(RequestError, match="does: embed, got generate; ask for vectors"):
            llm.generate([[4]])
        [long] = random_prompts([CONTEXT + 1])
        for wrong in (long, text_of(long)):
            with pytest.raises(RequestError, match=rf"prompt must be 1 to {CONTEXT} tokens"):
                llm.embed([wrong])
    nothing = "must be left out for a model that caches nothing, got "
    for options, text in (
        ({"chunked_prefill_size": 64}, f"^chunked_prefill_size must be at least {CONTEXT}"),
        ({"max_num_batched_tokens": 64}, f"^max_num_batched_tokens must be at least {CONTEXT}"),
        ({"kv_cache_bytes": 1 << 20}, f"^kv_cache_bytes {nothing}1048576; remove --kv-cache-mem"),
        ({"kv_cache_dtype": "fp8"}, f"^kv_cache_dtype {nothing}fp8_e4m3; remove --kv-cache-dtype$"),
        ({"page_size": 16}, f"^page_size {nothing}16; remove --page-size$"),
        ({"enable_prefix_cache": True}, f"^enable_prefix_cache {nothing}True; remove --enable-pre"),
        (
            {"tensor_parallel_size": 2},
            "^tensor_parallel_size must be one of 1, got 2: an encoder is not split among ranks; ",
        ),
        ({"speculative_algorithm": "NGRAM"}, "^speculative_algorithm must be left out"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_llm(encoder, **options)
        with pytest.raises(ConfigError, match=text):
            explain_model({"model": str(encoder.folder), "device": "cpu"} | options, gpu=None)
    with make_llm(encoder, max_model_len=64, chunked_prefill_size=64) as llm:
        assert len(llm.embed(random_prompts((64,)))) == 1


def test_a_record_of_an_encoder_is_replayed_and_refuses_as_it_does(tmp_path: Path) -> None:
    encoder = make_encoder("bert", tmp_path / "model")
    with boxed(encoder, tmp_path / "box") as llm:
        llm.embed(random_prompts(LENGTHS))
        llm.keep_stuck("nowhere")
    [record] = written(tmp_path / "box")
    assert replayed_as_it_was(record, attention_backend="none").num_restored == 0
    for asked, text in (
        ({"tensor_parallel_size": 2}, "an encoder is not split among ranks"),
        ({"kv_cache_bytes": 1 << 20}, "must be left out for a model that caches nothing"),
    ):
        with pytest.raises(ConfigError, match=text):
            replay(record, asked)


@pytest.mark.parametrize(
    ("case", "change", "text"),
    [
        ("bert", {"num_attention_heads": 5}, "num_attention_heads must be a divisor of hidden"),
        ("bert", {"hidden_act": "silu"}, "hidden_act must be one of gelu"),
        ("bert", {"is_decoder": True}, "is_decoder must be absent"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type must be"),
        ("modernbert-windows", {"num_attention_heads": 5}, "num_attention_heads must be a divisor"),
        ("modernbert-windows", {"layer_types": ["x"] * 3}, "layer_types must be 3 of full_att"),
    ],
)
def test_a_file_that_asks_for_more_is_refused(
    tmp_path: Path, case: str, change: dict[str, Any], text: str
) -> None:

    encoder = make_encoder(case, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=text):
        make_llm(encoder)


@pytest.mark.parametrize("every", [1, 2])
def test_older_files_say_how_often_a_layer_sees_all(tmp_path: Path, every: int) -> None:

    encoder = make_encoder(
        "modernbert-windows",
        tmp_path,
        layer_types=[
            "sliding_attention" if layer % every else "full_attention" for layer in range(3)
        ],
    )
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    ropes = said.pop("rope_parameters")
    del said["layer_types"]
    said |= {
        "global_attn_every_n_layers": every,
        "global_rope_theta": ropes["full_attention"]["rope_theta"],
        "local_rope_theta": ropes["sliding_attention"]["rope_theta"],
    }
    path.write_text(json.dumps(said))
    prompts = random_prompts((30, 5))
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(prompts), [encoder.vector(p, Pooling.MEAN) for p in prompts])


def test_dummy_weights_make_vectors_too(tmp_path: Path) -> None:
    for case in ("bert", "modernbert-biases"):
        folder = tmp_path / case
        folder.mkdir()
        encoder = make_encoder(case, folder)
        with make_llm(encoder, load_format="dummy") as llm:
            first, second = llm.embed([[4, 5], [6, 7, 8]])
        assert torch.from_numpy(first.vector - second.vector).abs().max() > 1e-4
