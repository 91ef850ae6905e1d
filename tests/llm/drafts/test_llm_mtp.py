"""A model that drafts with its own layer behind the last, in the whole engine."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mtp_checkpoints
import pytest
import torch
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    random_prompts,
    save_tokenizer,
)
from safetensors.torch import load_file, save_file
from speculative_cases import (
    Truth,
    accepted,
    check_metrics,
    check_served,
    drafting_llm,
    preemptions,
    serve,
    truth_of,
)
from transformers.cache_utils import MtpCache

from covers import Cell, slow_unless
from paceline.core.errors import ConfigError, WeightsError
from paceline.llm.llm import LLM
from paceline.plan.explain import explain_model

CASE = "deepseek_v3-bias-groups"
KINDS = ["greedy", "top-p"]
QUICK: list[Cell] = [
    {"topk": 1, "page_size": 1, "pool": "roomy", "enforce_eager": True, "params": "top-p"},
    {"topk": 2, "page_size": 16, "pool": "tight", "chunked_prefill_size": 7, "params": "greedy"},
]
CELLS: list[Cell] = [
    *QUICK,
    {"topk": 2, "page_size": 16, "pool": "tight", "stream": "deferred", "params": "greedy"},
    {"topk": 4, "page_size": 64, "pool": "roomy", "chunked_prefill_size": 7, "params": "top-p"},
    {"topk": 8, "page_size": 32, "pool": "roomy", "params": "greedy"},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    theirs = mtp_checkpoints.save_mtp(CASE, folder)
    save_tokenizer(folder)
    return Checkpoint(folder, theirs)


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint) -> Truth:
    return truth_of(checkpoint, {}, KINDS)


@pytest.mark.parametrize("cell", slow_unless(QUICK.__contains__, CELLS))
def test_drafts_change_no_text(truth: Truth, cell: Cell) -> None:
    kind = cell["params"]
    with drafting_llm(truth, cell | {"drafter": "MTP"}) as llm:
        num_draft_tokens = llm.report()["speculation"]["num_draft_tokens"]
        served = serve(llm, truth.jobs[kind])
    check_served(truth, kind, served)
    check_metrics(truth.jobs[kind], served, num_draft_tokens=num_draft_tokens)
    assert accepted(served) > 0
    assert (preemptions(served) > 0) == (cell["pool"] == "tight")


def reference_drafts(checkpoint: Checkpoint, tokens: Sequence[int]) -> list[int]:
    """By transformers' layer over the whole text: at p what it drafts for p + 2."""
    ids = torch.tensor([list(tokens)])
    hidden = checkpoint.theirs(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    mtp, at = mtp_checkpoints.load_mtp(checkpoint.theirs), torch.arange(len(tokens) - 1)[None]
    out = mtp.forward_layer(0, hidden, at, MtpCache(config=mtp.config), input_ids=ids[:, 1:])
    drafts: list[int] = mtp._project_to_logits(out)[0].argmax(-1).tolist()
    return drafts


def test_what_is_drafted_is_what_transformers_drafts(checkpoint: Checkpoint) -> None:
    prompt = random_prompts((12,), seed=4)[0]
    options = {"speculative_algorithm": "MTP", "speculative_num_steps": 1}
    with make_llm(checkpoint, **options) as llm:
        [output] = llm.generate([prompt], replace(GREEDY, trace_tokens=True))
    text = output.outputs[0]
    expected = reference_drafts(checkpoint, [*prompt, *text.token_ids])
    rounds = text.trace.rounds
    assert len(rounds) > 20
    for each in rounds:
        root = len(prompt) + each.at - 1
        assert each.token_ids == (expected[root - 1],)


def test_dummy_weights_draft(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint, speculative_algorithm="MTP", load_format="dummy") as llm:
        [output] = llm.generate([[5, 6, 7]], replace(GREEDY, max_tokens=8))
        report = llm.report()
    assert output.metrics.rounds > 0
    memory = report["memory"]
    assert memory["measured"]["weights"] == memory["planned"]["weights_bytes"]
    assert report["speculation"]["draft_model"] == str(checkpoint.folder)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises((ConfigError, WeightsError)) as caught:
        LLM(str(folder), device="cpu", speculative_algorithm="MTP", **options)
    return str(caught.value)


@pytest.mark.parametrize("count", [0, 2])
def test_other_numbers_of_layers_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, count: int
) -> None:
    folder = Path(shutil.copytree(checkpoint.folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    expected = (
        "config.json: num_nextn_predict_layers must be 1, for MTP: one layer, which reads its"
    )
    assert refusal(folder).startswith(expected)
    assert f"got {count}; name NGRAM" in refusal(folder)


def test_a_layer_that_is_not_there_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint.folder, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "eh_proj" not in name}
    save_file(kept, folder / "model.safetensors")
    assert "1 missing (fc.weight)" in refusal(folder)


def test_a_checkpoint_saved_without_the_layer_is_refused_before_it_is_read(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint.folder, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}
    save_file(last, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"with tensors 'model.layers.2....', the layer that MTP"):
        explain_model({"model": str(folder), "speculative_algorithm": "MTP"}, gpu="h200")


def test_who_has_no_such_layer_is_told_so(checkpoint: Checkpoint, tmp_path: Path) -> None:
    expected = (
        "speculative_algorithm must be MTP of a model of type deepseek_v3 or glm4_moe_lite or"
    )
    assert refusal(make_checkpoint("llama-gqa2-untied", tmp_path).folder).startswith(expected)
    said = refusal(checkpoint.folder, speculative_draft_model_path="bundled")
    assert "must be left out: MTP has layers of the model itself, got bundled" in said


@pytest.mark.parametrize(
    "topk", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["chain", "tree"]
)
def test_a_hybrid_model_drafts_with_its_layer_that_attends(tmp_path: Path, topk: int) -> None:
    theirs = mtp_checkpoints.save_mtp("qwen3_next-mtp", tmp_path)
    save_tokenizer(tmp_path)
    checkpoint, prompts = Checkpoint(tmp_path, theirs), random_prompts((5, 20))
    options = {"speculative_algorithm": "MTP", "speculative_eagle_topk": topk, "sanitize": True}
    options |= {"page_size": 4, "state_checkpoint_every": 8, "chunked_prefill_size": 7}
    with make_llm(checkpoint, **options) as llm:
        found = llm.generate(prompts, replace(GREEDY, max_tokens=24))
    for prompt, output in zip(prompts, found, strict=True):
        wanted = checkpoint.generate(prompt, 24)
        assert_same_or_tie(output.outputs[0].token_ids, wanted, checkpoint.gap(prompt))
        assert output.metrics.rounds > 0
