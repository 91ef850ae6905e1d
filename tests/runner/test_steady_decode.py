"""Between joins and leaves a decode step needs no host data at all."""

from collections import Counter

import pytest
from tiny_runner import Driver, TinyModel, random_prompts

from paceline.runner.streams import DeferredStream

STEPS = 100


@pytest.mark.parametrize("graph_max_reqs", [None, 8], ids=["eager", "recorded"])
@pytest.mark.parametrize("stream", ["inline", "deferred"])
@pytest.mark.parametrize("rows", [[1], [3, 1, 2]], ids=["one", "three"])
def test_steady_decode_steps_stage_nothing(
    tiny: TinyModel,
    counts: Counter[str],
    graph_max_reqs: int | None,
    stream: str,
    rows: list[int],
) -> None:
    driver = Driver(
        tiny,
        graph_max_reqs=graph_max_reqs,
        stream=DeferredStream() if stream == "deferred" else None,
    )
    driver.prefill(dict(zip(rows, random_prompts([5, 9, 2]), strict=False)))
    driver.decode(rows, steps=3)  # the eager use, the capture and its first replay
    before = Counter(counts)
    driver.decode_overlapped([rows] * STEPS)
    assert counts["put"] == before["put"]
    assert counts["fill"] == before["fill"]
    assert counts["replay"] - before["replay"] == (STEPS if graph_max_reqs else 0)
    assert all(len(driver.tokens[row]) == STEPS + 4 for row in rows)


def test_another_membership_stages_again(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny)
    driver.prefill(dict(zip([1, 2], random_prompts([5, 9]), strict=True)))
    driver.decode([1, 2], steps=3)
    before = Counter(counts)
    driver.decode([2, 1])
    driver.decode([2, 1])
    driver.decode([1, 2])
    assert counts["fill"] - before["fill"] == 2
    assert counts["put"] - before["put"] == 2


def test_a_capture_in_between_does_not_lose_the_facts(
    tiny: TinyModel, counts: Counter[str]
) -> None:
    """Capturing pads the buffers; the step that follows stages its facts anew."""
    driver = Driver(tiny)
    prompts = dict(zip([1, 2], random_prompts([5, 9]), strict=True))
    driver.prefill(prompts)
    before = counts["fill"]
    driver.decode([1, 2])
    driver.decode([1, 2])
    assert counts["fill"] - before == 2
    driver.decode([1, 2], steps=5)
    for row, prompt in prompts.items():
        assert driver.tokens[row] == tiny.greedy(prompt, 8)
