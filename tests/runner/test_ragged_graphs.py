"""Prefill and mixed steps as graphs: padded to a number of tokens, they are the same steps."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_runner import Driver, TinyModel, random_prompts, with_logprobs

from covers import Cell, cell_name, pairwise
from paceline.core.errors import GraphGuardError
from paceline.core.step import StepLayout
from paceline.runner.extents import PaddedSize
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.streams import DeferredStream

MAX_TOKENS = 64


def test_token_sizes_grow_by_at_most_half() -> None:
    sizes = GraphSizes.up_to(8, max_tokens=100).tokens
    assert sizes == (16, 24, 32, 48, 64, 96, 100)
    assert GraphSizes.up_to(8).tokens == ()
    assert GraphSizes.up_to(8, max_tokens=1).tokens == (1,)
    assert GraphSizes.up_to(8, max_tokens=9).tokens == (9,)  # what was asked for is a size


@pytest.mark.parametrize(
    ("reqs", "tokens", "padded"),
    [
        (1, 64, (1, 64)),  # nothing is left over
        (1, 63, (4, 64)),  # one token is left, in a row of its own
        (3, 40, (4, 48)),
        (4, 40, (9, 48)),  # a power of four, or all
        (8, 64, (9, 64)),
        (8, 63, (9, 64)),  # its row comes on top of the largest size
        (9, 63, None),
        (2, 65, None),
    ],
)
def test_a_ragged_step_is_padded_by_one_row(
    reqs: int, tokens: int, padded: tuple[int, int] | None
) -> None:
    size = GraphSizes.up_to(8, max_tokens=MAX_TOKENS).pad_ragged(reqs, tokens)
    assert size == (None if padded is None else PaddedSize.ragged(*padded))


def test_boot_captures_the_largest_of_both_shapes(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny, graph_max_tokens=MAX_TOKENS)
    assert counts["capture"] == 2
    shapes = {key.size for key in driver.runner._graphs.graphs}  # type: ignore[union-attr]
    assert shapes == {PaddedSize.ragged(9, MAX_TOKENS), PaddedSize.uniform(8, 1)}


def test_steps_of_other_token_counts_replay_other_graphs(tiny: TinyModel) -> None:
    driver = Driver(tiny, graph_max_tokens=MAX_TOKENS)
    for _ in range(2):
        for length in (3, 17, 24, 40):
            driver.prefill({1: random_prompts((length,))[0]})
    graphs = driver.runner._graphs.graphs  # type: ignore[union-attr]
    ragged = {key.ragged_tokens for key in graphs if key.extend_len is None}
    assert ragged == {16, 24, 48, MAX_TOKENS}


PREFILLS = {
    "family": ("llama", "gemma3"),
    "stream": ("inline", "deferred"),
    "page_size": (1, 3, 16),
}


@pytest.mark.parametrize("cell", pairwise(PREFILLS), ids=cell_name)
def test_replayed_prefills_give_the_tokens_of_transformers(
    tiny: TinyModel, tiny_gemma: TinyModel, counts: Counter[str], cell: Cell
) -> None:
    """Prompts of changing lengths share a few graphs; stale tails of longer ones stay behind."""
    model = tiny if cell["family"] == "llama" else tiny_gemma
    driver = Driver(
        model,
        graph_max_tokens=MAX_TOKENS,
        page_size=cell["page_size"],
        stream=DeferredStream() if cell["stream"] == "deferred" else None,
    )
    for lengths in ((20, 25), (9, 21), (30, 3), (17, 1), (40,), (16, 13), (5, 6), (7, 1)):
        prompts = dict(enumerate(random_prompts(lengths, seed=sum(lengths)), start=1))
        driver.prefill(prompts)
        driver.decode(list(prompts), steps=2)
        for row, prompt in prompts.items():
            assert driver.tokens[row] == model.greedy(prompt, 3)
    assert counts["replay"] > 16  # the decode steps, and prefills from their second use on


def test_mixed_steps_and_chunks_replay(tiny: TinyModel, counts: Counter[str]) -> None:
    """Rows decode while another's prompt comes in chunks that emit nothing until the last."""
    rng = random.Random(5)
    driver = Driver(tiny, graph_max_tokens=MAX_TOKENS)
    prompts = dict(enumerate(random_prompts((9, 14)), start=1))
    driver.prefill(prompts)
    long = random_prompts((60,), seed=9)[0]
    driver.join(3, long)
    left = len(long)
    replays = counts["replay"]
    while left:
        chunk = min(left, rng.randrange(8, 14))
        left -= chunk
        step = driver.make_step({1: 1, 2: 1, 3: chunk}, is_ragged=True)
        emits = (True, True, left == 0)
        object.__setattr__(step.layout, "emits", emits)
        driver.collect(driver.runner.launch(step))
    assert counts["replay"] - replays >= 3
    driver.decode([1, 2, 3], steps=2)
    for row, prompt in {**prompts, 3: long}.items():
        assert driver.tokens[row] == tiny.greedy(prompt, len(driver.tokens[row]))


def test_a_step_beyond_the_largest_graph_is_eager(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny, graph_max_tokens=MAX_TOKENS)
    for _ in range(3):
        driver.prefill({1: random_prompts((MAX_TOKENS + 1,))[0]})
    assert counts["replay"] == 0


@pytest.mark.parametrize("capture", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize(("rows", "padded"), [(1, 16), (3, 32)])
def test_a_full_batch_is_padded_like_any_other(
    tiny: TinyModel, counts: Counter[str], rows: int, padded: int, capture: bool
) -> None:
    """As many requests as may run, and a row more for the tokens left over."""
    driver = Driver(
        tiny,
        max_running=rows,
        graph_max_reqs=rows if capture else None,
        graph_max_tokens=MAX_TOKENS,
        sanitize=False,
    )
    for seed in range(3):
        prompts = dict(enumerate(random_prompts((9,) * rows, seed=seed), start=1))
        driver.prefill(prompts)
        assert driver.parts.buffers._filled[1] == PaddedSize.ragged(rows + 1, padded)
        driver.decode(list(prompts))
        for row, prompt in prompts.items():
            assert driver.tokens[row] == tiny.greedy(prompt, 2)
    assert counts["replay"] == (3 + 2 if capture else 0)


@pytest.mark.parametrize("capture", [True, False], ids=["recorded", "eager"])
def test_padding_moves_no_log_probability(tiny: TinyModel, capture: bool) -> None:
    """Of sampled tokens too, beside rows without tokens and those of what is left over: one, or
    two of up to 8 tokens each."""
    seen = []
    params = replace(with_logprobs(3), temperature=0.9, top_p=0.8, repetition_penalty=1.3)
    for max_tokens, pad_len in ((0, 0), (MAX_TOKENS, 0), (MAX_TOKENS, 8)):
        sizes = GraphSizes.up_to(8, max_tokens=max_tokens, pad_len=pad_len)
        driver = Driver(tiny, graph_max_reqs=8 if capture else None, sizes=sizes)
        for seed in range(3):
            prompts = dict(enumerate(random_prompts((17, 1, 31), seed=seed), start=1))
            for row, prompt in prompts.items():
                driver.join(row, prompt, replace(params, seed=row))
            lengths = {row: len(prompt) for row, prompt in prompts.items()}
            outputs = driver.collect(driver.launch_prefill(lengths))
            assert outputs.logprobs is not None
            seen.append([(row.chosen, *row.top_values[:3]) for (row,) in outputs.logprobs])
            seen.append([driver.tokens[row] for row in prompts])
    exact = seen[:6]
    for padded in (seen[6:12], seen[12:]):
        assert exact[1::2] == padded[1::2]
        torch.testing.assert_close(
            torch.tensor(exact[::2]), torch.tensor(padded[::2]), rtol=0, atol=1e-5
        )


def test_what_is_left_over_of_a_large_step_is_in_rows_within_the_context(tiny: TinyModel) -> None:
    """A graph may hold more tokens than a row; the longest gap, of 192 to 255, takes two rows."""
    pads = GraphSizes.up_to(8, max_tokens=256, pad_len=40)
    assert pads.spare_rows == 2
    size = pads.pad_ragged(3, 200)
    assert size == PaddedSize.ragged(10, 256, 40)
    layout = StepLayout(rows=(1, 2, 3), extend_lens=(40, 80, 80), emits=(True,) * 3)
    assert size.pad_lens(layout) == (40, 16, 0, 0, 0, 0, 0)
    assert pads.pad_ragged(9, 200) is None


def test_the_guard_refuses_more_tokens_than_the_graph_holds(tiny: TinyModel) -> None:
    driver = Driver(tiny, graph_max_tokens=MAX_TOKENS)
    driver.join(1, random_prompts((70,))[0])
    step = driver.make_step({1: 70}, is_ragged=True)
    key = next(k for k in driver.runner._graphs.graphs if k.extend_len is None)  # type: ignore[union-attr]
    with pytest.raises(GraphGuardError, match="tokens must be at most 64, got 70"):
        driver.runner._guard.check(key, step)


def test_the_guard_keeps_a_row_for_the_tokens_that_are_left_over(tiny: TinyModel) -> None:
    driver = Driver(tiny, graph_max_tokens=MAX_TOKENS)
    longest = next(k for k in driver.runner._graphs.graphs if k.extend_len is None)  # type: ignore[union-attr]
    key = replace(longest, padded_reqs=1)
    for row, tokens in ((1, MAX_TOKENS), (2, MAX_TOKENS - 1)):
        driver.join(row, random_prompts((tokens,))[0])
    driver.runner._guard.check(key, driver.make_step({1: MAX_TOKENS}, is_ragged=True))
    step = driver.make_step({2: MAX_TOKENS - 1}, is_ragged=True)
    with pytest.raises(GraphGuardError, match="requests must be at most 0, got 1; pad the step"):
        driver.runner._guard.check(key, step)


def test_padding_takes_the_stride_or_what_is_left(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    driver.join(1, random_prompts((9,))[0])
    layout = driver.make_step({1: 3}, is_ragged=True).layout
    assert PaddedSize.uniform(4, 3).pad_lens(layout) == (3, 3, 3)
    assert PaddedSize.ragged(4, 16).pad_lens(layout) == (13, 0, 0)
    assert PaddedSize.exact(layout).pad_lens(layout) == ()
    with pytest.raises(AssertionError, match="13 tokens are left of 16"):
        PaddedSize.ragged(1, 16).pad_lens(layout)
