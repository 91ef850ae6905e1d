"""Step: what it says of its rows, plain, drafted and padded."""

from dataclasses import replace

import pytest

from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout, padded_step


def step(*extend_lens: int, **facts: object) -> Step:
    num = len(extend_lens)
    return Step(
        epoch=1,
        layout=StepLayout(
            rows=tuple(range(1, num + 1)), extend_lens=extend_lens, emits=(True,) * num
        ),
        prefix_lens_bound=(5,) * num,
        sampler=SamplerTier.GREEDY,
        logprobs=False,
        deltas=(),
        **{"is_ragged": False} | facts,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (step(1, 1), "decode step"),
        (step(1, 7, is_ragged=True), "ragged step"),
        (step(1, 1, is_ragged=True), "ragged step"),
        (step(3, 3), "step of 3 tokens each"),
        (step(3, 3, is_round=True), "round"),
        (step(), "decode step"),
    ],
)
def test_people_are_told_what_a_step_is(made: Step, kind: str) -> None:
    assert made.kind == kind


def test_a_padded_round_is_a_round() -> None:
    padded = padded_step(step(3, 3, is_round=True, mask=MaskKind.TREE), (3,))
    assert padded.is_round
    assert padded.mask is MaskKind.TREE
    assert padded.layout.extend_lens == (3, 3, 3)


def test_a_padded_tree_has_padded_rows_that_hang_on_their_prefix() -> None:
    tree = step(2, 2, mask=MaskKind.TREE)
    tree = replace(tree, layout=replace(tree.layout, parents=((-1, 0), (-1, -1))))
    assert padded_step(tree, (2,)).layout.parents == ((-1, 0), (-1, -1), (-1, -1))
