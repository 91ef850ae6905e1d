"""Greedy tokens are transformers', whatever the engine does to compute them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

import pytest
import torch
import transformers
from llm_cases import (
    AXES,
    GREEDY,
    Checkpoint,
    Tokens,
    assert_idle,
    assert_same_or_tie,
    llm_of,
    make_checkpoint,
    make_head64_checkpoint,
    make_llm,
    random_prompts,
    recorded_steps,
    shared_prompts,
    text_of,
    tokens_of,
)

from covers import Cell, cell_name, every_cell, pairwise, slow_unless
from paceline.core.model.cache_groups import cache_group_specs
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.models.locate import BUNDLED_FOLDER

# Page size -> pages of each group's pool: the longest request fits, all together do not.
TIGHT: dict[str, dict[int, tuple[int, ...]]] = {
    "llama-gqa2-untied": {1: (121,), 16: (13,), 64: (5,)},
    "gemma3-untied-full-rope-linear": {1: (121, 121), 16: (13, 13), 64: (5, 5)},
}
# Fixtures of this file, and what of an answer is asked for again.
MODELS = {"model": ("llama", "gemma")}
BEGINNING = replace(GREEDY, max_tokens=12)


@dataclass(frozen=True)
class Truth:
    """A checkpoint, prompts, and transformers' greedy answers."""

    checkpoint: Checkpoint
    prompts: list[list[int]]
    answers: list[Tokens]
    tight: Mapping[int, tuple[int, ...]]

    def check(self, index: int, token_ids: Tokens, num_tokens: int | None = None) -> None:
        """num_tokens: of the answer; None: all."""
        gap_of = self.checkpoint.gap(self.prompts[index])
        assert_same_or_tie(token_ids, self.answers[index][:num_tokens], gap_of)


def make_truth(case: str, folder, prompts: list[list[int]], num_tokens: int) -> Truth:
    checkpoint = make_checkpoint(case, folder)
    answers = [checkpoint.generate(prompt, num_tokens) for prompt in prompts]
    return Truth(checkpoint, prompts, answers, TIGHT.get(case, {}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Truth:
    folder = tmp_path_factory.mktemp("llama")
    return make_truth("llama-gqa2-untied", folder, shared_prompts(), GREEDY.max_tokens)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Truth:
    """Windows of 9 tokens: every request outgrows them and returns pages behind them."""
    folder = tmp_path_factory.mktemp("gemma")
    case = "gemma3-untied-full-rope-linear"
    return make_truth(case, folder, shared_prompts(), GREEDY.max_tokens)


def run_compositions(llm: LLM, truth: Truth) -> int:
    """Together, and the beginnings in another order and of two alone, where pages of 16 are crossed
    again; returns the preemptions of the first."""
    order = list(range(len(truth.prompts)))
    together = llm.generate(truth.prompts, GREEDY)
    for batch in (order[::-1], order[1:2], order[4:5]):
        again = llm.generate([truth.prompts[i] for i in batch], BEGINNING)
        for i, token_ids in zip(batch, tokens_of(again), strict=True):
            truth.check(i, token_ids, BEGINNING.max_tokens)
    for i, token_ids in enumerate(tokens_of(together)):
        truth.check(i, token_ids)
    assert_idle(llm)
    return sum(output.metrics.preemptions for output in together)


def check_cell(truth: Truth, cell: Cell) -> None:
    with llm_of(truth.checkpoint, cell, tight_pages=truth.tight) as llm:
        preemptions = run_compositions(llm, truth)
    assert (preemptions > 0) == (cell.get("pool") == "tight"), f"{preemptions} preemptions"


def is_quick(cell: Cell) -> bool:
    """Long chunks and short ones; what is poisoned has windows too."""
    is_poisoned = cell["stream"] == "deferred"
    return cell["chunked_prefill_size"] != 16 and (not is_poisoned or cell["model"] == "gemma")


@pytest.mark.parametrize("cell", slow_unless(is_quick, pairwise(MODELS | AXES)))
def test_greedy_tokens_are_transformers(cell: Cell, request: pytest.FixtureRequest) -> None:
    options = dict(cell)
    check_cell(request.getfixturevalue(options.pop("model")), options)


@pytest.mark.slow
@pytest.mark.parametrize("cell", every_cell(AXES), ids=cell_name)
def test_greedy_tokens_are_transformers_in_the_full_cross(llama: Truth, cell: Cell) -> None:
    check_cell(llama, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", every_cell(AXES), ids=cell_name)
def test_greedy_tokens_of_a_windowed_model_in_the_full_cross(gemma: Truth, cell: Cell) -> None:
    check_cell(gemma, cell)


def test_a_windowed_group_serves_a_request_it_could_never_hold(gemma: Truth) -> None:
    """Sequences of 116 tokens from 15 pages of one token: those behind the window come back."""
    chunk, window = 7, 9
    least = window - 1 + chunk
    with make_llm(gemma.checkpoint) as llm:
        config = llm._live.prepared.config
    groups = cache_group_specs(config, 1)
    pages = tuple(1 + (least if group.window else 128) for group in groups)
    assert sorted(pages) == [16, 129]
    knobs = Knobs(num_pages=pages)
    options = {"page_size": 1, "chunked_prefill_size": chunk, "enable_prefix_cache": False}
    with make_llm(gemma.checkpoint, knobs=knobs, **options) as llm:
        for index, token_ids in enumerate(tokens_of(llm.generate(gemma.prompts, GREEDY))):
            gemma.check(index, token_ids)
        assert_idle(llm)


# What the interpreter runs is few and short: each kernel runs its programs one by one in Python.
INTERPRETED = {
    "enforce_eager": (False, True),
    "page_size": (1, 16, 64),
    "enable_prefix_cache": (True, False),
    "chunked_prefill_size": (16, 1024),
    "pool": ("roomy", "tight"),
}
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def head64(tmp_path_factory) -> Truth:
    """Two requests that cross a page of 16 and of 64 while they decode."""
    checkpoint = make_head64_checkpoint(tmp_path_factory.mktemp("head64"))
    prompts = random_prompts((63, 64), seed=1)
    answers = [checkpoint.generate(prompt, SHORT.max_tokens) for prompt in prompts]
    return Truth(checkpoint, prompts, answers, {1: (129,), 16: (10,), 64: (4,)})


@pytest.mark.parametrize("cell", pairwise(INTERPRETED), ids=cell_name)
def test_greedy_tokens_on_the_triton_interpreter_are_transformers(
    head64: Truth, cell: Cell
) -> None:
    options = {"margin": 0, "attention_backend": "triton", "max_num_seqs": 2}
    with llm_of(head64.checkpoint, cell, tight_pages=head64.tight, **options) as llm:
        outputs = llm.generate(head64.prompts, SHORT)
        assert_idle(llm)
    for index, token_ids in enumerate(tokens_of(outputs)):
        head64.check(index, token_ids)
    preemptions = sum(output.metrics.preemptions for output in outputs)
    assert (preemptions > 0) == (cell["pool"] == "tight")


def script(llm: LLM, prompts: list[list[int]]) -> list[object]:
    """Two streams, one of which joins late, an abort, and everything they showed."""
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=40, logprobs=2)
    stopped = SamplingParams(temperature=0.0, max_tokens=40, stop=(text_of((7, 8)), "q"))
    first = llm.generate(prompts[:4], [GREEDY, sampled, stopped, GREEDY], stream=True)
    shown: list[object] = [next(first) for _ in range(12)]
    second = llm.generate(prompts[4:], sampled, stream=True)
    shown += [next(first) for _ in range(8)]
    assert llm.abort(shown[0].request_id)
    for pair in zip_longest(first, second):
        shown += pair
    return [(output.request_id, output.finished, output.outputs) for output in shown if output]


@pytest.mark.parametrize(
    ("chunk", "pool"),
    [
        (7, "tight"),
        (1024, "roomy"),
        pytest.param(7, "roomy", marks=pytest.mark.slow),
        pytest.param(1024, "tight", marks=pytest.mark.slow),
    ],
)
def test_the_twin_takes_the_same_steps_and_shows_the_same(
    llama: Truth, chunk: int, pool: str
) -> None:
    """Bit-equal tokens and log-probabilities, and equal Steps with their deltas."""
    seen = []
    for overlap, stream in ((True, "inline"), (True, "deferred"), (False, "inline")):
        cell = {"overlap": overlap, "pool": pool, "stream": stream, "chunked_prefill_size": chunk}
        with (
            llm_of(llama.checkpoint, cell, tight_pages=llama.tight) as llm,
            recorded_steps(llm) as steps,
        ):
            shown = script(llm, llama.prompts)
            assert_idle(llm)
        seen.append((steps, shown))
    overlapped, deferred, twin = seen
    assert len(twin[0]) > 40
    assert overlapped == twin
    assert deferred == twin


def test_the_bundled_model_writes_what_transformers_writes() -> None:
    checkpoint = Checkpoint(
        BUNDLED_FOLDER,
        transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32),
    )
    texts = ["def fibonacci(n):", "class Stack:\n    def push(self, item):\n"]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for options in ({}, {"enforce_eager": True, "chunked_prefill_size": 3, "page_size": 1}):
        with make_llm(checkpoint, dtype="float32", max_model_len=256, **options) as llm:
            for output in llm.generate(texts, params):
                prompt = output.prompt_token_ids
                ours, theirs = output.outputs[0].token_ids, checkpoint.generate(prompt, 24)
                assert_same_or_tie(ours, theirs, checkpoint.gap(prompt))


def test_another_token_is_no_tie(llama: Truth) -> None:
    """The comparison can fail: the second best token, one token more, one token less."""
    prompt, answer = llama.prompts[0], llama.answers[0]
    logits = llama.checkpoint.logits([*prompt, *answer[:9]])[-1]
    second = logits.topk(2).indices[1].item()
    gap_of = llama.checkpoint.gap(prompt)
    with pytest.raises(AssertionError, match=rf"token 9 is {answer[9]} or {second}: logit gap"):
        assert_same_or_tie(answer, (*answer[:9], second, *answer[10:]), gap_of)
    for other in (answer[:-1], (*answer, 5)):
        with pytest.raises(AssertionError, match="one answer is longer"):
            assert_same_or_tie(answer, other, gap_of)


def test_a_tie_is_told_with_its_gap(tmp_path, capsys) -> None:
    """Two tokens with one and the same row of the output head."""

    def make_twins(model: transformers.PreTrainedModel) -> None:
        model.lm_head.weight[91] = model.lm_head.weight[90] = 5 * model.lm_head.weight.abs()[90]

    checkpoint = make_checkpoint("llama-gqa2-untied", tmp_path, change=make_twins)
    prompt = next(
        prompt
        for prompt in random_prompts([6] * 200)
        if checkpoint.logits(prompt)[-1].argmax() in (90, 91)
    )
    assert_same_or_tie((90, 5), (91, 6), checkpoint.gap(prompt))
    assert "token 0 is 90 or 91: logit gap 0.000e+00, a tie below" in capsys.readouterr().out
