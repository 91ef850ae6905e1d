"""Blocks of a prompt: where a step, or a prefix that is found again, may end."""

import pytest

from paceline.core.request.blocks import Blocks

PICTURES = Blocks(((2, 6), (6, 9), (12, 13)))


@pytest.mark.parametrize(
    ("length", "whole"),
    [
        (0, 0),
        (2, 2),
        (3, 2),
        (5, 2),
        (6, 6),
        (7, 6),
        (9, 9),
        (11, 11),
        (12, 12),
        (13, 13),
        (99, 99),
    ],
)
def test_the_most_tokens_that_end_no_block_in_two(length: int, whole: int) -> None:
    assert PICTURES.whole(length) == whole


@pytest.mark.parametrize(
    ("start", "stop", "meets"),
    [(0, 2, False), (0, 3, True), (5, 6, True), (9, 12, False), (10, 14, True), (13, 20, False)],
)
def test_tokens_of_a_block_are_met(start: int, stop: int, meets: bool) -> None:
    assert PICTURES.meets(start, stop) == meets


def test_the_longest_counts_tokens() -> None:
    assert PICTURES.longest == 4
