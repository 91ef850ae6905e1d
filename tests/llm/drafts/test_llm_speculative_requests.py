"""What a request can ask for, and what can go wrong in it, is the same with a drafter."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_checkpoints import save_eagle, save_eagle3, soften
from llm_cases import (
    Checkpoint,
    assert_idle,
    make_checkpoint,
    make_llm,
    random_prompts,
    shared_prompts,
    tokens_of,
)
from safetensors.torch import load_file, save_file
from speculative_cases import LOGPROB_TOLERANCE, Truth, llama_truth

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NOISY = SamplingParams(temperature=0.9, max_tokens=24, seed=2)
# A head's tree and a lookup stand for those that are slow.
DRAFTS = [
    ("EAGLE3", 4),
    ("NGRAM", 1),
    pytest.param("EAGLE", 1, marks=pytest.mark.slow),
    pytest.param("STANDALONE", 2, marks=pytest.mark.slow),
]
POISON = 40  # its embedding is NaN; no shared prompt leads to it


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("llama"), kinds=())


def both(truth: Truth, drafter: str, topk: int, **options: Any) -> tuple[LLM, LLM]:
    """Two engines of the same options, without and with a drafter."""
    drafts = truth.speculation(drafter, topk)
    return make_llm(truth.checkpoint, **options), make_llm(truth.checkpoint, **options | drafts)


@pytest.mark.parametrize(("drafter", "topk"), DRAFTS)
def test_prompts_are_scored_as_without_drafts(truth: Truth, drafter: str, topk: int) -> None:
    params = replace(GREEDY, prompt_logprobs=2, logprobs=1)
    prompts = random_prompts((30, 1, 12))
    plain, drafted = both(truth, drafter, topk, chunked_prefill_size=7)
    with plain, drafted:
        pairs = zip(plain.generate(prompts, params), drafted.generate(prompts, params), strict=True)
        for expected, got in pairs:
            assert got.outputs[0].token_ids == expected.outputs[0].token_ids
            assert got.prompt_logprobs is not None
            scores = zip(expected.prompt_logprobs[1:], got.prompt_logprobs[1:], strict=True)
            for one, other in scores:
                assert one.top_ids == other.top_ids
                assert abs(one.chosen - other.chosen) < LOGPROB_TOLERANCE
        assert_idle(drafted)


@pytest.mark.parametrize(("drafter", "topk"), DRAFTS)
def test_a_plug_in_processor_sees_each_draft_at_its_own_position(
    truth: Truth, drafter: str, topk: int
) -> None:
    """The end grows likelier with every token: where it comes tells the position."""
    options = {"logits_processors": ("example_processor:LengthDecay",)}
    decay = {"length_decay": [4, 1.2]}
    params = [
        replace(NOISY, extra_args=decay, seed=seed, max_tokens=60, logit_bias={2: 1.0})
        for seed in range(4)
    ]
    prompts = random_prompts((9, 20, 3, 14))
    plain, drafted = both(truth, drafter, topk, **options)
    with plain, drafted:
        expected = plain.generate(prompts, params)
        assert {output.outputs[0].finish_reason for output in expected} == {"stop"}
        assert tokens_of(drafted.generate(prompts, params)) == tokens_of(expected)


@pytest.mark.parametrize("topk", [1, 4])
def test_a_plug_in_processor_reads_the_drafts_of_each_path(truth: Truth, topk: int) -> None:
    """Which of two tokens comes next depends on the draft before it."""
    options = {"logits_processors": ("alternating_processor:Alternate",)}
    params = replace(GREEDY, extra_args={"alternate": 100.0})
    prompts = random_prompts((9, 20, 3))
    plain, drafted = both(truth, "NGRAM", topk, **options)
    with plain, drafted:
        expected = tokens_of(plain.generate(prompts, params))
        assert {len(set(tokens)) for tokens in expected} == {2}
        outputs = drafted.generate(prompts, params)
    assert tokens_of(outputs) == expected
    assert all(sum(output.metrics.accepted_by_position) > 0 for output in outputs)


@pytest.mark.parametrize(("drafter", "topk"), DRAFTS)
def test_every_seed_and_temperature_gives_the_text_of_plain_decoding(
    truth: Truth, drafter: str, topk: int
) -> None:
    params = [
        replace(NOISY, temperature=temperature, seed=seed, top_p=top_p, n=2)
        for seed, (temperature, top_p) in enumerate(
            ((0.3, 1.0), (1.0, 0.7), (1.7, 1.0), (3.0, 0.9))
        )
    ]
    prompts = random_prompts((9, 20, 3, 14))
    plain, drafted = both(truth, drafter, topk)
    with plain, drafted:
        pairs = zip(plain.generate(prompts, params), drafted.generate(prompts, params), strict=True)
        for expected, got in pairs:
            assert [one.token_ids for one in got.outputs] == [
                one.token_ids for one in expected.outputs
            ]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    def change(model: Any) -> None:
        model.get_input_embeddings().weight[POISON] = math.nan

    folder = tmp_path_factory.mktemp("poisoned")
    return make_checkpoint("llama-gqa2-untied", folder, change=change)


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_non_finite_logits_fail_their_request_and_no_other(
    checkpoint: Checkpoint, poisoned: Checkpoint, topk: int
) -> None:
    """In its prompt, or once a round has sampled it; and later users of the same pages."""
    healthy = shared_prompts()
    sick = [*healthy[0][:12], POISON, *healthy[0][12:]]
    answers = [tuple(checkpoint.generate(prompt, GREEDY.max_tokens)) for prompt in healthy]
    forced = replace(GREEDY, logit_bias={POISON: 100.0})
    drafts: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(checkpoint.folder),
        "speculative_eagle_topk": topk,
    }
    with make_llm(poisoned, page_size=4, **drafts) as llm:
        for _ in range(2):
            found = llm.generate([*healthy, sick, healthy[1]], [GREEDY] * 7 + [forced])
            assert [each.outputs[0].finish_reason for each in found[6:]] == ["error"] * 2
            assert tokens_of(found[6:]) == [(), (POISON,)]
            assert tokens_of(found[:6]) == answers
        assert_idle(llm)


@pytest.mark.parametrize("rows", [150, 170])
def test_a_draft_model_with_a_vocabulary_padded_otherwise_drafts(
    truth: Truth, tmp_path: Path, rows: int
) -> None:
    """The target itself, its tables cut or padded: what both know is accepted."""
    draft = Path(shutil.copytree(truth.checkpoint.folder, tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text()) | {"vocab_size": rows}
    (draft / "config.json").write_text(json.dumps(config))
    for path in draft.glob("*.safetensors"):
        named = load_file(path)
        for name in named.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
            table = named[name]
            named[name] = torch.cat((table, table[-10:]))[:rows].contiguous()
        save_file(named, path)
    options: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(draft),
    }
    prompts = shared_prompts()
    with make_llm(truth.checkpoint) as plain, make_llm(truth.checkpoint, **options) as llm:
        found = llm.generate(prompts, GREEDY)
        assert tokens_of(found) == tokens_of(plain.generate(prompts, GREEDY))
        assert sum(each.metrics.rounds for each in found) < 0.7 * GREEDY.max_tokens * len(prompts)
    with make_llm(truth.checkpoint, speculative_acceptance="rejection", **options) as llm:
        found = llm.generate(prompts, NOISY)
        assert {each.outputs[0].finish_reason for each in found} <= {"length", "stop"}
        assert_idle(llm)


def test_a_head_that_says_nothing_finite_costs_speed_alone(truth: Truth, tmp_path: Path) -> None:
    head = truth.drafters["EAGLE3"]
    named = load_file(head / "model.safetensors")
    named["fc.weight"].fill_(math.nan)
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    prompts = shared_prompts()
    kinds = (GREEDY, NOISY)
    with make_llm(truth.checkpoint) as plain:
        expected = [tokens_of(plain.generate(prompts, params)) for params in kinds]
    for topk in (1, 4):
        options = truth.speculation("EAGLE3", topk)
        options["speculative_draft_model_path"] = str(tmp_path)
        with make_llm(truth.checkpoint, enable_prefix_cache=False, **options) as llm:
            for params, answers in zip(kinds, expected, strict=True):
                assert tokens_of(llm.generate(prompts, params)) == answers
            assert_idle(llm)
    assert torch.isnan(named["fc.weight"]).all()


@pytest.mark.parametrize(
    ("algorithm", "save", "topk"),
    [
        pytest.param("EAGLE", save_eagle, 4, id="1-4"),
        pytest.param("EAGLE3", save_eagle3, 1, id="3-1"),
        pytest.param("EAGLE", save_eagle, 1, id="1-1", marks=pytest.mark.slow),
        pytest.param("EAGLE3", save_eagle3, 4, id="3-4", marks=pytest.mark.slow),
    ],
)
def test_a_head_reads_no_token_that_its_request_does_not_know(
    tmp_path: Path, algorithm: str, save: Callable[[Checkpoint, Path], Path], topk: int
) -> None:
    """A history is 0 behind its end; here the embedding of 0 is NaN, and nobody says 0."""

    def change(model: Any) -> None:
        soften(model)
        model.get_input_embeddings().weight[0] = math.nan
        model.lm_head.weight[0] = 0.0

    target, prompts = (
        make_checkpoint("llama-gqa2-untied", tmp_path, change=change),
        shared_prompts(),
    )
    drafts: dict[str, Any] = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(save(target, tmp_path / "head")),
        "speculative_eagle_topk": topk,
    }
    with make_llm(target) as plain, make_llm(target, **drafts) as llm:
        expected = plain.generate(prompts, GREEDY)
        assert tokens_of(llm.generate(prompts, GREEDY)) == tokens_of(expected)
        assert_idle(llm)
