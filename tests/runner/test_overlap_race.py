"""Two steps in flight need a staging ring deeper than one slot: the deferred stream shows it.

A slot whose copy has not been executed yet must not be rewritten.  With one slot, the second launch
rewrites the first one's facts before they travel.
"""

from collections.abc import Callable

import pytest
from tiny_runner import Driver, TinyModel, random_prompts

from paceline.runner.staging import RING_DEPTH, STEPS_IN_FLIGHT
from paceline.runner.streams import DeferredStream, Stream

PROMPTS = dict(zip(range(1, 5), random_prompts([5, 9, 4, 7]), strict=True))
Tokens = dict[int, list[int]]


def changing_members(driver: Driver) -> None:
    """Every step stages facts: no two neighbours decode the same rows."""
    driver.prefill(PROMPTS)
    driver.decode_overlapped([[1, 2], [3, 4]] * 6)


def joining_members(driver: Driver) -> None:
    """Every step stages a join: a token history, a sampling row, pages."""
    prompts = random_prompts([6, 6, 6, 6], seed=5)
    first = driver.launch_prefill(_joined(driver, 1, prompts[0]))
    for row in (2, 3, 4):
        second = driver.launch_prefill(_joined(driver, row, prompts[row - 1]))
        driver.collect(first)
        first = second
    driver.collect(first)
    driver.decode([1, 2, 3, 4], steps=6)


def _joined(driver: Driver, row: int, prompt: list[int]) -> dict[int, int]:
    driver.join(row, prompt)
    return {row: len(prompt)}


def run(
    tiny: TinyModel, scenario: Callable[[Driver], None], stream: Stream | None, depth: int
) -> Tokens:
    driver = Driver(
        tiny,
        graph_max_reqs=None,
        stream=stream,
        staging_depth=depth,
        sanitize=False,  # it reports the race, and the tokens are to show it
    )
    scenario(driver)
    return driver.tokens


@pytest.mark.parametrize("scenario", [changing_members, joining_members])
def test_one_slot_is_a_race_and_the_ring_is_none(
    tiny: TinyModel, scenario: Callable[[Driver], None]
) -> None:
    wanted = run(tiny, scenario, None, RING_DEPTH)
    assert run(tiny, scenario, DeferredStream(), RING_DEPTH) == wanted
    assert run(tiny, scenario, DeferredStream(), STEPS_IN_FLIGHT) == wanted
    assert run(tiny, scenario, DeferredStream(), 1) != wanted
    assert run(tiny, scenario, None, 1) == wanted  # work that executes at once cannot race


def test_the_inline_tokens_are_those_of_transformers(tiny: TinyModel) -> None:
    tokens = run(tiny, changing_members, None, RING_DEPTH)
    for row, prompt in PROMPTS.items():
        assert tokens[row] == tiny.greedy(prompt, 7)


@pytest.mark.parametrize("depth", [RING_DEPTH, RING_DEPTH - 1])
def test_a_full_ring_of_launches_rewrites_no_slot_in_use(tiny: TinyModel, depth: int) -> None:
    """RING_DEPTH launches before the first wait: each keeps its own facts, and needs its own."""
    members = [[1], [2, 3], [4]]
    assert len(members) == RING_DEPTH
    driver = Driver(tiny, graph_max_reqs=None, stream=DeferredStream(), staging_depth=depth)
    driver.prefill(PROMPTS)
    for launched in [driver.launch_decode(rows) for rows in members]:
        driver.collect(launched)
    wanted = {row: tiny.greedy(prompt, 2) for row, prompt in PROMPTS.items()}
    assert (driver.tokens == wanted) == (depth == RING_DEPTH)
