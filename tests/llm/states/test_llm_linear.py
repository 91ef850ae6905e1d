"""Models with layers of linear attention through the whole engine: the text is transformers'.

Where float32 cannot tell two tokens apart either may stand, and what follows is not compared.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_checkpoints import save_echo
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    random_prompts,
)

from covers import Cell, all_with_a_cover
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM

EVERY = 8
SHORT = replace(GREEDY, max_tokens=12)
CASES = ("qwen3_next-unlike-heads",)
WEAK = 0.1  # of what layers add to the stream


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def engine(checkpoint: Checkpoint, **options: Any) -> LLM:
    """That keeps a state at every EVERY tokens."""
    return make_llm(checkpoint, **{"page_size": 4, "state_checkpoint_every": EVERY} | options)


def check(
    llm: LLM, checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Any]:
    """Generate, and compare every token; returns the outputs."""
    found = llm.generate([list(each) for each in prompts], replace(SHORT, max_tokens=num_tokens))
    for prompt, output in zip(prompts, found, strict=True):
        wanted = checkpoint.generate(prompt, num_tokens)
        assert_same_or_tie(output.outputs[0].token_ids, wanted, checkpoint.gap(prompt))
    assert_idle(llm)
    return found


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
        pytest.param({"cuda_graph_max_tokens": 48, "max_num_seqs": 6}, id="ragged graphs"),
    ],
)
def test_16_ragged_requests_say_what_transformers_says(
    checkpoint: Checkpoint, options: dict[str, Any]
) -> None:
    with engine(checkpoint, **options) as llm:
        found = check(llm, checkpoint, ragged(16), 8)
    assert any(output.metrics.cached_tokens for output in found)


def test_a_hit_ends_at_a_kept_state_on_a_boundary_and_beside_one(checkpoint: Checkpoint) -> None:
    (first,) = random_prompts([33])
    with engine(checkpoint, chunked_prefill_size=6, max_num_seqs=32) as llm:
        check(llm, checkpoint, [first], 2)
        for length in (7, 8, 9, 16, 17, 32):
            (found,) = check(llm, checkpoint, [[*first[:length], 5]], 4)
            assert found.metrics.cached_tokens == length // EVERY * EVERY
            (again,) = check(llm, checkpoint, [first[:length]], 4)
            assert again.metrics.cached_tokens == (length - 1) // EVERY * EVERY


def test_chunks_shorter_than_the_convolution_behind_a_hit(checkpoint: Checkpoint) -> None:
    (first,) = random_prompts([24])
    for chunk in (1, 2, 3):
        with engine(checkpoint, chunked_prefill_size=chunk) as llm:
            check(llm, checkpoint, [first[:17]], 1)
            (found,) = check(llm, checkpoint, [first], 4)
            assert found.metrics.cached_tokens == 16


def test_who_is_preempted_says_the_same_when_it_goes_on(checkpoint: Checkpoint) -> None:
    prompts = [prompt * 2 for prompt in random_prompts((14, 17, 20, 9, 3, 12))]
    knobs = Knobs(num_pages=(36, 12), reserve_ahead=0, admission_margin=0)
    with engine(checkpoint, knobs=knobs, max_num_seqs=4) as llm:
        found = check(llm, checkpoint, prompts, 24)
    assert sum(output.metrics.preemptions for output in found)


def soften(theirs: Any) -> None:
    """Let a token follow mostly from the one before it, so that drafts are right at times."""
    for name, weight in theirs.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            weight.mul_(WEAK)
    theirs.model.norm.weight.zero_()  # the factor is 1 behind it


@pytest.fixture(scope="module", params=CASES)
def soft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("soft"), change=soften)


@pytest.fixture(scope="module")
def drafter(soft: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that is the model's embedding and head, and nothing between them."""

    def take_tables(theirs: Any) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            own, table = soft.theirs.get_parameter(name), theirs.get_parameter(name)
            table.zero_()[:, : own.shape[1]] = own
        theirs.model.norm.weight.fill_(1.0)
        for layer in theirs.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    folder = tmp_path_factory.mktemp("drafter")
    make_checkpoint("llama-gqa2-untied", folder, change=take_tables)
    return folder


@pytest.fixture(scope="module")
def head(soft: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    hidden = soft.theirs.config.hidden_size
    return save_echo(soft, tmp_path_factory.mktemp("head"), torch.ones(hidden))


DRAFTED = {
    "drafter": ("NGRAM", "STANDALONE", "EAGLE"),
    "topk": (1, 2),
    "enforce_eager": (True, False),
}


@pytest.mark.parametrize("cell", all_with_a_cover(DRAFTED))
def test_drafts_change_no_text(soft: Checkpoint, drafter: Path, head: Path, cell: Cell) -> None:
    name, eager = cell["drafter"], cell["enforce_eager"]
    options = {"speculative_algorithm": name, "speculative_eagle_topk": cell["topk"]}
    options |= {"speculative_num_steps": 3, "enforce_eager": eager, "sanitize": not eager}
    if name != "NGRAM":
        path = drafter if name == "STANDALONE" else head
        options["speculative_draft_model_path"] = str(path)
    prompts = [prompt * 2 for prompt in random_prompts((5, 9, 20, 2))]
    with engine(soft, chunked_prefill_size=7, **options) as llm:
        found = check(llm, soft, prompts, 24)
        told = [*found[0].prompt_token_ids, *found[0].outputs[0].token_ids]
        check(llm, soft, [[*told, 9]], 4)  # behind states that rounds kept, or passed
    by_position = zip(*(o.metrics.accepted_by_position for o in found), strict=True)
    first, second, *_ = map(sum, by_position)
    rounds = sum(output.metrics.rounds for output in found)
    assert 0 < second < first < rounds  # more than a draft, one, and none


def test_an_interval_within_a_page_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="must be a multiple of the page size, 4 tokens, got 6"):
        engine(checkpoint, state_checkpoint_every=6)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("refusing_states:NoTrees", {"speculative_eagle_topk": 2}, "mask tree, of causal"),
        ("refusing_states:HalfStates", {}, "part 'state' of torch.float32, of torch.bfloat16"),
        ("refusing_states:NarrowConv", {}, "convolution over 4 tokens, of up to 3"),
        ("refusing_states:LongChunks", {}, "states kept every 8 tokens, of multiples of its chunk"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(
    checkpoint: Checkpoint, name: str, options: dict[str, Any], reason: str
) -> None:
    drafts = {"speculative_algorithm": "NGRAM"} | options if options else {}
    with pytest.raises(BackendUnsupported) as caught:
        engine(checkpoint, linear_attention_backend=name, **drafts)
    assert any(reason in each for each in caught.value.reasons), caught.value.reasons
    assert "--linear-attention-backend" in str(caught.value)


def test_a_backend_is_named_for_models_with_states_alone(tmp_path: Path) -> None:
    llama = make_checkpoint("llama-gqa2-untied", tmp_path)
    with pytest.raises(ConfigError, match="left out with a model whose layers keep no states"):
        make_llm(llama, linear_attention_backend="torch")


def test_the_backend_that_is_named_runs(checkpoint: Checkpoint) -> None:
    name = "paceline.attention.backends.gdn_torch:TorchGdn"
    with engine(checkpoint, linear_attention_backend=name) as llm:
        check(llm, checkpoint, random_prompts([9]), 3)
