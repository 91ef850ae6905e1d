"""EmbeddingGemma: a Gemma 3 whose tokens see one another in both directions, and what
sentence-transformers' files put behind it."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from embedders import Embedder, assert_vectors, make_embedder, write_modules
from llm_cases import assert_idle, make_llm, random_prompts, save_tokenizer
from safetensors.torch import save_file

from paceline.core.errors import ModelError, WeightsError
from paceline.core.modes import Pooling
from paceline.models import gemma3_text

CONTEXT = 96
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
}
LENGTHS = (40, 1, 9, 33, CONTEXT)
DENSE = (64, 24)  # widths of 2_Dense and 3_Dense


def make_gemma(folder: Path, *, window: int = 8, **more: Any) -> Embedder:
    """window: as a file says it."""
    config = transformers.Gemma3TextConfig(**SIZES, sliding_window=window, **more)
    config._attn_implementation = "eager"
    torch.manual_seed(zlib.crc32(b"gemma"))
    theirs = transformers.Gemma3TextModel(config).eval().requires_grad_(False)
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.save_pretrained(folder)
    save_tokenizer(folder)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == window
    return Embedder(folder, theirs)


def add_dense(folder: Path, widths: tuple[int, ...] = DENSE, **said: Any) -> list[torch.Tensor]:
    """Dense modules behind the pooling, and a Normalize; returns their weights."""
    write_modules(folder, Pooling.MEAN)
    modules, weights, before = json.loads((folder / "modules.json").read_text()), [], 40
    for index, width in enumerate(widths, start=2):
        name = f"{index}_Dense"
        entry = {"idx": index, "name": str(index), "path": name}
        modules.insert(index, entry | {"type": "sentence_transformers.models.Dense"})
        (folder / name).mkdir()
        weights.append(torch.randn(width, before))
        save_file({"linear.weight": weights[-1]}, folder / name / "model.safetensors")
        act = "torch.nn.modules.linear.Identity"
        told = {"in_features": before, "out_features": width, "bias": False}
        told |= {"activation_function": act, **said}
        (folder / name / "config.json").write_text(json.dumps(told))
        before = width
    (folder / "modules.json").write_text(json.dumps(modules))
    return weights


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Embedder:
    return make_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.mark.parametrize("way", [{}, {"cuda_graph_max_tokens": 96, "sanitize": True}])
def test_vectors_are_those_of_transformers(gemma: Embedder, way: dict[str, Any]) -> None:
    prompts = random_prompts(LENGTHS)
    wanted = [gemma.vector(ids, Pooling.MEAN) for ids in prompts]
    with make_llm(gemma, **way) as llm:
        for _ in range(3):
            assert_vectors(llm.embed(prompts), wanted)
        assert_idle(llm)
        assert (llm._live.runner.parts.device_pools, llm.prepared.groups) == ((), ())


@pytest.mark.parametrize("window", [2, 6, 200])
def test_a_window_is_half_its_width_on_each_side_ends_left_out(tmp_path, window: int) -> None:
    gemma, prompts = make_gemma(tmp_path, window=window), random_prompts((30, 5))
    with make_llm(gemma) as llm:
        assert_vectors(llm.embed(prompts), [gemma.vector(ids, Pooling.MEAN) for ids in prompts])


def test_a_window_of_another_convention_would_show(gemma: Embedder, monkeypatch) -> None:
    """That of ModernBERT counts one more on each side, a causal layer's none ahead."""
    prompts = random_prompts((30,))
    wanted = [gemma.vector(ids, Pooling.MEAN) for ids in prompts]
    real = gemma3_text.read_windows
    monkeypatch.setattr(
        gemma3_text, "read_windows", lambda *a, window, **k: real(*a, window=window + 1, **k)
    )
    with make_llm(gemma) as llm, pytest.raises(AssertionError, match="vectors differ"):
        assert_vectors(llm.embed(prompts), wanted)


def test_dense_modules_stand_behind_the_pooling(tmp_path: Path) -> None:
    gemma, prompts = make_gemma(tmp_path), random_prompts((9, 20))
    first, second = add_dense(tmp_path)
    rows = [gemma.vector(ids, Pooling.MEAN, normalize=False) for ids in prompts]
    wanted = [second.double() @ (first.double() @ row) for row in rows]
    unit = [torch.nn.functional.normalize(row, dim=0) for row in wanted]
    with make_llm(gemma) as llm:
        assert_vectors(llm.embed(prompts), unit)
        assert_vectors(llm.embed(prompts, normalize=False), wanted)
        cut = llm.embed(prompts, dimensions=10)
    assert_vectors(cut, [torch.nn.functional.normalize(row[:10], dim=0) for row in wanted])


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"in_features": 41}, "2_Dense/config.json: in_features must be 40, which it is given"),
        ({"activation_function": "torch.nn.Mish"}, "activation_function must be torch's Identity"),
        ({"use_residual": True}, "use_residual must be absent, got True"),
        ({"module_input_name": "token_embeddings"}, "module_input_name must be one of sentence_em"),
    ],
)
def test_a_dense_module_that_does_more_is_refused(tmp_path: Path, said, text: str) -> None:
    gemma = make_gemma(tmp_path)
    add_dense(tmp_path, (24,), **said)
    with pytest.raises(ModelError, match=text):
        make_llm(gemma)


def test_an_activation_behind_a_mean_of_several_steps_is_refused(tmp_path: Path) -> None:
    """Of a causal model, whose prompts come in chunks; a product alone may stand there."""
    embedder = make_embedder(tmp_path, Pooling.MEAN)
    act = "torch.nn.modules.activation.Tanh"
    [weight] = add_dense(tmp_path, (24,), activation_function=act)
    with pytest.raises(ModelError, match=r"^2_Dense\.linear of .* must be without an activation"):
        make_llm(embedder)
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(path.read_text().replace("Tanh", "Identity"))
    prompts = random_prompts((9, 50))
    rows = [embedder.vector(ids, Pooling.MEAN, normalize=False) for ids in prompts]
    wanted = [torch.nn.functional.normalize(weight.double() @ row, dim=0) for row in rows]
    with make_llm(embedder, max_num_batched_tokens=16) as llm:
        assert_vectors(llm.embed(prompts), wanted)


def test_a_dense_module_without_its_weights_is_refused(tmp_path: Path) -> None:
    gemma = make_gemma(tmp_path)
    add_dense(tmp_path, (24,), bias=True)
    with pytest.raises(WeightsError, match=r"1 missing \(2_Dense\.linear\.bias\)"):
        make_llm(gemma)
