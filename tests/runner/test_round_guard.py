"""The guard before rounds: the drafter's tensors stay where they were, drafts fit the end."""

from collections.abc import Callable

import pytest
from tiny_drafters import CHAIN, eagle3
from tiny_runner import CONTEXT, Driver, TinyModel, random_prompts

from paceline.cache.pool import KVPool
from paceline.core.errors import GraphGuardError

ROWS = (2, 5, 7)


def replaying(tiny: TinyModel, length: int = 5) -> Driver:
    """A driver whose rounds replay a graph."""
    driver = Driver(tiny, draft=CHAIN, make_proposer=eagle3(tiny, CHAIN), sanitize=False)
    driver.prefill(dict(zip(ROWS, random_prompts([length] * 3), strict=True)))
    driver.rounds(ROWS, 2)
    return driver


def move(owner: object, name: str) -> None:
    setattr(owner, name, getattr(owner, name).clone())


def move_part(pool: KVPool, name: str) -> None:
    pool.parts[name] = pool.parts[name].clone()


MOVED: dict[str, Callable[[Driver], None]] = {
    "draft.features": lambda driver: move(driver.parts.proposer, "_features"),
    "draft.positions": lambda driver: move(driver.parts.proposer._passes._buffers, "positions"),
    "kv.draft-full.k": lambda driver: move_part(driver.parts.proposer.pools[0], "k"),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_drafter_whose_tensors_moved_is_refused_by_name(tiny: TinyModel, name: str) -> None:
    driver = replaying(tiny)
    MOVED[name](driver)
    with pytest.raises(GraphGuardError, match=rf"moved: {name}"):
        driver.rounds(ROWS, 1)


def test_drafts_behind_the_end_of_the_context_fit(tiny: TinyModel) -> None:
    driver = replaying(tiny, length=CONTEXT - 35)
    driver.rounds(ROWS, 35)
    assert [len(driver.tokens[row]) for row in ROWS] == [35] * 3


def test_a_round_behind_all_that_was_reserved_is_refused(tiny: TinyModel) -> None:
    driver = replaying(tiny)
    driver._known[5] = CONTEXT + 4
    with pytest.raises(GraphGuardError, match="kv_lens must be at most 126, got 128"):
        driver.launch_round(ROWS)
