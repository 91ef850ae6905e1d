"""A model with recurrent layers through the whole engine: beside attention, and alone.

The text is that of transformers' Llama, of two layers or of none, and of two sums in Python.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llm_cases import (
    GREEDY,
    VOCAB,
    Checkpoint,
    assert_idle,
    make_llm,
    random_prompts,
    save_tokenizer,
)
from sum_model import add_sums, register, said_alone

from paceline.core.errors import BackendUnsupported
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM

EVERY = 8
LAYERS = {"beside attention": 2, "alone": 0}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        register(patch)
        yield


def make_llama(folder: Path, num_layers: int) -> transformers.PreTrainedModel:
    """Small, and of so many layers."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=[2, 3],
    )
    torch.manual_seed(num_layers)
    theirs = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    theirs.save_pretrained(folder)
    save_tokenizer(folder)
    return theirs


class Alone:
    """A checkpoint with sums, and what it says with no engine around it."""

    def __init__(self, folder: Path, num_layers: int) -> None:
        self.theirs = make_llama(folder, num_layers)
        self.checkpoint = Checkpoint(folder, self.theirs)
        self.page = {"page_size": 4} if num_layers else {}
        add_sums(folder)
        self.says = cache(self._says)

    def _says(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        return tuple(said_alone(self.theirs, prompt, num_tokens))

    def llm(self, **options: Any) -> LLM:
        """An engine that keeps a state at every EVERY tokens."""
        return make_llm(self.checkpoint, **self.page | {"state_checkpoint_every": EVERY} | options)

    def check(
        self, llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Any]:
        """Generate, and compare every token; returns the outputs."""
        found = llm.generate([list(prompt) for prompt in prompts], params)
        for prompt, output in zip(prompts, found, strict=True):
            assert output.outputs[0].token_ids == self.says(tuple(prompt), params.max_tokens)
        assert_idle(llm)
        return found


@pytest.fixture(scope="module", params=sorted(LAYERS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("sums"), LAYERS[request.param])


@pytest.fixture(scope="module")
def drafter(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its sums; of one that has no other layers, two that add nothing."""
    folder = tmp_path_factory.mktemp("drafter")
    llama = make_llama(folder, 2)
    found = llama.load_state_dict(alone.theirs.state_dict(), strict=False)
    for name in found.missing_keys:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            llama.get_parameter(name).zero_()
    llama.save_pretrained(folder)
    return folder


SHORT = replace(GREEDY, max_tokens=10)


def ragged(num: int) -> list[list[int]]:
    """Prompts of 1 to 39 tokens, every second one behind some of a common text."""
    rng = random.Random(3)
    (family,) = random_prompts([30])
    own = random_prompts([rng.randrange(1, 10) for _ in range(num)], seed=1)
    return [[*family[: rng.randrange(30) * (i % 2)], *prompt] for i, prompt in enumerate(own)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enforce_eager": True, "chunked_prefill_size": 7}, id="eager, odd chunks"),
        pytest.param({"sanitize": True, "max_num_seqs": 5}, id="graphs, sanitized"),
        pytest.param({"overlap": False, "chunked_prefill_size": 3}, id="the twin loop"),
    ],
)
def test_the_text_is_that_of_the_model_alone(alone: Alone, options: dict[str, Any]) -> None:
    with alone.llm(**options) as llm:
        found = alone.check(llm, ragged(16), SHORT)
        graphs = llm.engine._runner._graphs
    assert any(output.metrics.cached_tokens for output in found)
    assert (graphs is None) == options.get("enforce_eager", False)
    assert graphs is None or graphs.graphs


def test_a_hit_ends_at_a_kept_state_and_beside_one(alone: Alone) -> None:
    (first,) = random_prompts([33])
    lengths = (7, 8, 9, 15, 16, 17, 26, 32)
    with alone.llm(chunked_prefill_size=6, max_num_seqs=32) as llm:  # with room for all states
        alone.check(llm, [first], SHORT)
        for length in lengths:
            (found,) = alone.check(llm, [[*first[:length], 5]], SHORT)
            assert found.metrics.cached_tokens == length // EVERY * EVERY
            (again,) = alone.check(llm, [first[:length]], SHORT)
            assert again.metrics.cached_tokens == (length - 1) // EVERY * EVERY


def test_text_that_was_generated_is_found_again(alone: Alone) -> None:
    with alone.llm() as llm:
        (found,) = alone.check(llm, random_prompts([5]), replace(SHORT, max_tokens=30))
        told = [*found.prompt_token_ids, *found.outputs[0].token_ids]
        (again,) = alone.check(llm, [[*told, 9]], SHORT)
    assert again.metrics.cached_tokens == 32


def test_nothing_is_found_without_a_prefix_cache(alone: Alone) -> None:
    with alone.llm(enable_prefix_cache=False, state_checkpoint_every=None) as llm:
        for _ in range(2):
            (found,) = alone.check(llm, random_prompts([33]), SHORT)
            assert found.metrics.cached_tokens == 0


def test_who_lacks_room_is_preempted_or_waits(alone: Alone) -> None:
    """Pages run out as requests grow; of states each has its one."""
    prompts = [prompt * 2 for prompt in random_prompts((14, 17, 20, 9, 3, 12))]
    pages = (36, 12) if alone.page else (4,)
    knobs = Knobs(num_pages=pages, reserve_ahead=0, admission_margin=0)
    with alone.llm(knobs=knobs, max_num_seqs=4) as llm:
        found = alone.check(llm, prompts, replace(SHORT, max_tokens=24))
    preempted = sum(output.metrics.preemptions for output in found)
    assert (preempted > 0) == bool(alone.page)


@pytest.mark.parametrize(
    ("name", "topk"),
    [
        ("NGRAM", 1),
        ("STANDALONE", 2),
        pytest.param("NGRAM", 2, marks=pytest.mark.slow),
        pytest.param("STANDALONE", 1, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_text(alone: Alone, drafter: Path, name: str, topk: int) -> None:
    options: dict[str, Any] = {"speculative_algorithm": name, "speculative_eagle_topk": topk}
    options |= {"speculative_num_steps": 3}
    if name == "STANDALONE":
        options |= {"speculative_draft_model_path": str(drafter), "page_size": 4}
    prompts = [prompt * 2 for prompt in random_prompts((5, 9, 20, 2))]
    with alone.llm(chunked_prefill_size=7, **options) as llm:
        found = alone.check(llm, prompts, replace(SHORT, max_tokens=14))
        told = [*found[0].prompt_token_ids, *found[0].outputs[0].token_ids]
        alone.check(llm, [[*told, 9]], SHORT)  # behind states that rounds kept, or passed
    assert sum(output.metrics.rounds for output in found) > 0
    accepted = sum(sum(output.metrics.accepted_by_position) for output in found)
    assert accepted > 0 or name == "NGRAM"


def test_a_model_of_states_alone_has_no_attention_to_choose(tmp_path: Path) -> None:
    alone = Alone(tmp_path, 0)
    with pytest.raises(BackendUnsupported) as caught:
        alone.llm(attention_backend="torch")
    assert "no layer attends over a cache: leave --attention-backend out" in str(caught.value)
    with alone.llm() as llm:
        why = "no layer attends over a cache"
        assert llm.report()["attention"] == {"name": "none", "why": why}


def test_a_model_that_attends_is_refused_none(tmp_path: Path) -> None:
    alone = Alone(tmp_path, 2)
    with pytest.raises(BackendUnsupported) as caught:
        alone.llm(attention_backend="none")
    assert "it attends to nothing, and layers of the model attend" in str(caught.value)
