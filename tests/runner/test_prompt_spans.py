"""Steps that score prompt tokens: eager, packed in order, and nothing left over in their slot."""

from dataclasses import replace

import pytest
import torch
from faulty_backends import ReadsTailOfPrompts
from tiny_runner import Driver, TinyModel, random_prompts

from paceline.core.errors import SanitizerError
from paceline.core.step import PromptSpan


@pytest.fixture
def prompts() -> list[list[int]]:
    return random_prompts([9, 6])


def scores(tiny: TinyModel, prompt: list[int]) -> torch.Tensor:
    """[len - 1, vocab]  log-probabilities of what follows each token, by transformers."""
    return tiny.theirs(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def test_spans_of_several_rows_come_back_by_row(tiny: TinyModel, prompts) -> None:
    """One step with two prompts: part of the first is scored, and all of the second."""
    driver = Driver(tiny)
    for row, prompt in enumerate(prompts, start=1):
        driver.join(row, prompt)
    step = driver.make_step({1: 9, 2: 6}, is_ragged=True)
    spans = (PromptSpan(0, 3, 4, 2), PromptSpan(1, 9, 5, 3))
    found = driver.collect(driver.runner.launch(replace(step, prompt_spans=spans))).prompt_logprobs
    assert found.keys() == {0, 1}
    first, second = scores(tiny, prompts[0])[3:7], scores(tiny, prompts[1])
    for rows, theirs, wanted in ((found[0], first, prompts[0][4:8]), (found[1], second, None)):
        ids = torch.tensor(wanted or prompts[1][1:])
        chosen = theirs.gather(1, ids[:, None])[:, 0]
        assert torch.allclose(torch.tensor([row.chosen for row in rows]), chosen, atol=1e-4)
        assert {len(row.top_ids) for row in rows} == {3}  # the most that a span of the step wants
        best = theirs.topk(3).values
        assert torch.allclose(torch.tensor([row.top_values for row in rows]), best, atol=1e-4)


def test_a_step_with_spans_is_never_replayed(tiny: TinyModel, prompts) -> None:
    driver = Driver(tiny)
    driver.prefill({1: prompts[0]})
    step = driver.make_step({1: 1})
    assert driver.runner._keys.of(step) is not None
    assert driver.runner._keys.of(replace(step, prompt_spans=(PromptSpan(0, 0, 1, 1),))) is None


def test_a_step_without_spans_reports_none(tiny: TinyModel, prompts) -> None:
    driver = Driver(tiny)
    assert not driver.prefill({1: prompts[0]}).prompt_logprobs


def test_the_sanitizer_looks_at_scores_of_prompts(tiny: TinyModel, prompts) -> None:
    """A fault in the last layer shows in nothing else: no later layer stores what it computed."""
    driver = Driver(tiny, backend=ReadsTailOfPrompts(layer_id=1), graph_max_reqs=4)
    driver.prefill({1: prompts[0]})  # nobody asks for the tokens before the last
    driver.join(2, prompts[1])
    step = driver.make_step({2: 6}, is_ragged=True)
    with pytest.raises(SanitizerError, match="changes the prompt's log-probabilities of rows 2"):
        driver.runner.launch(replace(step, prompt_spans=(PromptSpan(0, 0, 5, 1),)))
