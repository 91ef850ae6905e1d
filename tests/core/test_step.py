"""Step: what it says of its rows, plain, drafted and padded."""

import pytest

from paceline.core.modes import ForwardMode, MaskKind
from paceline.core.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout, padded_step


def verify(**layout: object) -> Step:
    return Step(
        epoch=1,
        mode=ForwardMode.TARGET_VERIFY,
        layout=StepLayout(rows=(1, 2), extend_lens=(3, 3), emits=(True, True), **layout),  # type: ignore[arg-type]
        prefix_lens_bound=(5, 7),
        sampler=SamplerTier.GREEDY,
        logprobs=False,
        deltas=(),
    )


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.TREE])
def test_a_round_has_the_mask_of_its_drafts(mask: MaskKind) -> None:
    step = verify(drafts=mask)
    assert step.is_round
    assert step.mask is mask


def test_a_verification_that_the_host_spells_out_is_no_round() -> None:
    step = verify(parents=((-1, 0, 0), (-1, 0, 1)))
    assert not step.is_round
    assert step.mask is MaskKind.TREE


def test_a_padded_round_is_a_round() -> None:
    padded = padded_step(verify(drafts=MaskKind.TREE), (3,))
    assert padded.is_round
    assert padded.mask is MaskKind.TREE
    assert padded.layout.extend_lens == (3, 3, 3)
