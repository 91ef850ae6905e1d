"""Drafters that do not fit are refused when the engine is built, with what was expected and got."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_checkpoints import DRAFT_VOCAB, save_eagle3, soften
from llm_cases import Checkpoint, assert_idle, make_checkpoint, make_llm, random_prompts, tokens_of
from safetensors.torch import load_file, save_file

from paceline.core.errors import (
    ConfigError,
    ModelError,
    PacelineError,
    RequestError,
    WeightsError,
)
from paceline.core.request.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WEIGHTS = "model.safetensors"
Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("target")
    return make_checkpoint("llama-gqa2-untied", folder, change=soften)


@pytest.fixture(scope="module")
def good_head(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_eagle3(target, tmp_path_factory.mktemp("head"))


@pytest.fixture
def head(good_head: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(good_head, tmp_path / "head"))


def damaged(head: Path, damage: Damage) -> Path:
    config = json.loads((head / "config.json").read_text())
    named = load_file(head / WEIGHTS)
    damage(config, named)
    (head / "config.json").write_text(json.dumps(config))
    save_file(named, head / WEIGHTS)
    return head


def refusal(target: Checkpoint, algorithm: str, head: Path | None, **options: Any) -> PacelineError:
    if head is not None:
        options["speculative_draft_model_path"] = str(head)
    with pytest.raises(PacelineError) as caught:
        make_llm(target, speculative_algorithm=algorithm, **options)
    return caught.value


def _config(**changes: object) -> Damage:
    return lambda config, named: config.update(changes)


BAD_HEADS: dict[str, tuple[Damage, type[Exception], str]] = {
    "vocabulary": (
        _config(vocab_size=161),
        ConfigError,
        "the draft head's vocab_size must be the target's 160, got 161; pass",
    ),
    "hidden size": (
        _config(target_hidden_size=32),
        ConfigError,
        "the draft head's target hidden size must be the target's 64, got 32; pass",
    ),
    "taps": (
        _config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
        ConfigError,
        "must be layers 0 to 1 of the target, got [0, 1, 2]; pass",
    ),
    "default taps": (
        _config(eagle_config={}),
        ConfigError,
        "the target must be deep enough for the default taps 1 < L / 2 - 1 < L - 4, got L = 2",
    ),
    "no d2t": (
        lambda config, named: named.pop("d2t"),
        WeightsError,
        f"with a tensor d2t: its vocabulary has {DRAFT_VOCAB} of 160 tokens, got none",
    ),
    "d2t outside": (
        lambda config, named: named["d2t"][-1:].fill_(17),
        WeightsError,
        "'d2t' must be offsets to target ids 0 to 159, got 160",
    ),
    "weights of another shape": (
        lambda config, named: named.update({"norm.weight": torch.ones(63)}),
        WeightsError,
        "norm.weight",
    ),
    "a missing weight": (
        lambda config, named: named.pop("fc.weight"),
        WeightsError,
        "fc.weight",
    ),
    "another algorithm": (
        _config(architectures=["LlamaForCausalLMEagle"], draft_vocab_size=None),
        ConfigError,
        "speculative_algorithm must be EAGLE, which the draft head's config.json describes",
    ),
    "quantised": (
        _config(quantization_config={"bits": 4}),
        ModelError,
        "use an unquantised draft head",
    ),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_head_that_does_not_fit_is_refused(target: Checkpoint, head: Path, name: str) -> None:
    damage, kind, text = BAD_HEADS[name]
    error = refusal(target, "EAGLE3", damaged(head, damage))
    assert isinstance(error, kind), error
    assert text in str(error)


BAD_SHAPES: dict[str, tuple[dict[str, int], str]] = {
    "no branches": ({"speculative_eagle_topk": 0}, "speculative_eagle_topk must be from 1 to 16"),
    "more than a tree holds": (
        {
            "speculative_eagle_topk": 2,
            "speculative_num_steps": 2,
            "speculative_num_draft_tokens": 8,
        },
        "speculative_num_draft_tokens must be at most 7: a tree of 2 steps with topk 2 has 6",
    ),
    "another chain": (
        {"speculative_num_steps": 3, "speculative_num_draft_tokens": 6},
        "speculative_num_draft_tokens must be 4 (a chain of 3 and its root), got 6",
    ),
    "more than a step holds": (
        {"speculative_num_steps": 7, "max_num_batched_tokens": 60},
        "max_num_batched_tokens must be at least 64, got 60; a step holds the 8 tokens of a round "
        "of every running request",
    ),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_a_shape_that_cannot_be_is_refused(target: Checkpoint, good_head: Path, name: str) -> None:
    options, text = BAD_SHAPES[name]
    error = refusal(target, "EAGLE3", good_head, **options)
    assert isinstance(error, ConfigError)
    assert text in str(error)


def test_a_draft_model_of_other_tokens_is_refused(target: Checkpoint, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(target.folder, tmp_path / "draft"))
    tokens = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["ac"], vocab["ad"] = vocab["ad"], vocab["ac"]
    (draft / "tokenizer.json").write_text(json.dumps(tokens))
    error = refusal(target, "STANDALONE", draft)
    assert isinstance(error, ConfigError)
    assert "differs in 2 ids: 2 is 'ad', there 'ac'; name a smaller model" in str(error)


def test_a_request_says_on_or_off_and_nothing_else(target: Checkpoint, good_head: Path) -> None:
    """A request that is refused leaves an engine that serves."""
    prompts = random_prompts((9, 20))
    with make_llm(target) as plain:
        expected = tokens_of(plain.generate(prompts, GREEDY))
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(good_head)}
    with make_llm(target, **drafts) as llm:
        for value in ("maybe", 1, None):
            asked = {"temperature": 0.0, "speculative": value}
            with pytest.raises(RequestError, match=r"speculative must be .*got"):
                llm.generate(prompts, asked)
        asked = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "speculative": "off"}
        outputs = llm.generate(prompts, [asked, GREEDY])
        assert tokens_of(outputs) == expected
        assert [output.metrics.rounds > 0 for output in outputs] == [False, True]
        assert_idle(llm)


def test_without_a_drafter_a_request_may_still_say_off(target: Checkpoint) -> None:
    with make_llm(target) as llm:
        for value in ("off", "on"):
            asked = {"temperature": 0.0, "max_tokens": 3, "speculative": value}
            assert llm.generate([[9, 8]], asked)[0].metrics.rounds == 0
