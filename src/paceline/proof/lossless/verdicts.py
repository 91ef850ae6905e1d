"""Verdicts: whether two answers to one prompt are equal, part at a tie, or show a bug.

Engines that compute the same in other shapes round otherwise, so two tokens whose scores lie closer
than that noise may change places, and from there the texts differ.  A score is what the sampler
takes the largest of: logits, or logits / temperature + Gumbel noise over what the filters keep.

A tie needs a gap of at most TIE_ULPS, in ulps of the model's dtype at the largest logit.  Logits of
the bundled model, of a prompt computed at once and token by token, differ by up to 10 ulps in
float32 and 2.2 in bfloat16 and float16; a gap between two of them moves by twice as much, and
deeper models accumulate more.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from paceline.core.request.sampling_params import SamplingParams
from paceline.layers.sampling.noise import gumbel

TIE_ULPS = {torch.float32: 32.0, torch.bfloat16: 8.0, torch.float16: 8.0}


class Verdict(StrEnum):
    """What a comparison of two answers came to, from good to bad."""

    EQUAL = "equal"
    TIE = "tie"
    BUG = "bug"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where two answers part."""

    index: int  # of the generated tokens
    wanted: int | None  # the reference's token; None: it had ended
    got: int | None  # the contender's
    gap_ulps: float | None  # the lower score of the two below the best; None where one had ended

    def verdict(self, dtype: torch.dtype) -> Verdict:
        """TIE or BUG, for a model of `dtype`."""
        is_tie = self.gap_ulps is not None and self.gap_ulps <= TIE_ULPS[dtype]
        return Verdict.TIE if is_tie else Verdict.BUG


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs or that one answer lacks; None: they are equal."""
    for index, pair in enumerate(zip(wanted, got, strict=False)):
        if pair[0] != pair[1]:
            return index
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


def part(
    wanted: Sequence[int],
    got: Sequence[int],
    logits_behind: Callable[[Sequence[int]], Tensor],
    *,
    params: SamplingParams,
    num_known: int,
    dtype: torch.dtype,
) -> Parting | None:
    """Where two answers part, and by how little; None: they are equal.

    logits_behind: [vocab] float32 of the reference, behind tokens that both answers share.
    num_known: prompt tokens.  params: without penalties, biases and top-k; params.seed is set.
    """
    index = first_difference(wanted, got)
    if index is None:
        return None
    one = wanted[index] if index < len(wanted) else None
    other = got[index] if index < len(got) else None
    gap = None
    if one is not None and other is not None:
        logits = logits_behind(wanted[:index])
        gap = gap_ulps(logits, (one, other), params=params, position=num_known + index, dtype=dtype)
    return Parting(index=index, wanted=one, got=other, gap_ulps=gap)


def gap_ulps(
    logits: Tensor,
    pair: tuple[int, int],
    *,
    params: SamplingParams,
    position: int,
    dtype: torch.dtype,
) -> float:
    """How far the lower score of `pair` lies below the best, in ulps of the largest logit.

    logits: [vocab] float32; position: of the token to sample.  Infinite where a filter keeps one of
    the two out, whatever the noise of rounding.
    """
    ulp = torch.finfo(dtype).eps * max(float(logits.abs().max()), torch.finfo(dtype).tiny)
    if params.temperature == 0.0:
        return float(logits.max() - logits[list(pair)].min()) / ulp
    scaled = (logits - logits.max()).double() / params.temperature
    assert params.seed is not None, "a seeded answer has a seed"
    noise = gumbel(torch.tensor([params.seed]), torch.tensor([position]), logits.shape[0])
    scores = scaled + noise[0]
    surely, perhaps = _kept(scaled, params.top_p, TIE_ULPS[dtype] * ulp / params.temperature)
    if not perhaps[list(pair)].all():
        return float("inf")
    lower = float(scores[list(pair)].min())
    best = float(scores[surely].max()) if surely.any() else lower
    return max(0.0, best - lower) * params.temperature / ulp


def _kept(scaled: Tensor, top_p: float, gap: float) -> tuple[Tensor, Tensor]:
    """([vocab] bool, [vocab] bool): what top-p keeps whatever rounding does, and what it may keep.

    scaled: [vocab] float64.  Rounding swaps tokens that lie at most `gap` apart, and multiplies the
    odds of any set of tokens by at most exp(gap).
    """
    if top_p >= 1.0:
        everything = torch.ones_like(scaled, dtype=torch.bool)
        return everything, everything
    ranked = scaled.sort(descending=True).values
    mass = torch.nn.functional.pad(ranked.softmax(0).cumsum(0), (1, 0))  # of the first i
    surely_before = mass[torch.searchsorted(-ranked, -(scaled + gap))]
    perhaps_before = mass[torch.searchsorted(-ranked, -(scaled - gap), right=True)]
    factor = math.exp(min(gap, 700.0))
    low = top_p / (top_p + (1 - top_p) * factor)
    high = top_p * factor / (top_p * factor + 1 - top_p)
    # `perhaps_before` counts the token itself, so the best needs a word of its own.
    is_ahead = (scaled >= ranked[0]) & (ranked[0] - ranked[1] > gap)
    return is_ahead | (perhaps_before < low), surely_before < high
