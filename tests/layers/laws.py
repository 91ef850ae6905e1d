"""Laws of sampling, computed apart, and Pearson's test of counts against them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.request.sampling_params import SamplingParams

SIGNIFICANCE = 1e-4


def p_value(counts: Tensor, law: Tensor) -> float:
    """Of rows of counts, each drawn from its row of `law`; how often each was drawn is given.

    counts, law: [rows, tokens].  0 when something was drawn that the law excludes.
    """
    law = law.double() / law.double().sum(-1, keepdim=True)
    expected = counts.sum(-1, keepdim=True) * law
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    tested = expected > 0
    statistic = ((counts - expected)[tested] ** 2 / expected[tested]).sum()
    freedom = tested.sum() - tested.any(-1).sum()
    return float(torch.special.gammaincc(freedom / 2.0, statistic / 2.0))


def table_of(before: Tensor, after: Tensor, tokens: int) -> Tensor:
    """[tokens, tokens] float64: how often `after` followed `before`."""
    return (
        torch.bincount(before * tokens + after, minlength=tokens**2).view(tokens, tokens).double()
    )


def law_of(logits: Tensor, params: SamplingParams, known: Sequence[int] = ()) -> Tensor:
    """[vocab] float64: what plain sampling draws from behind `known` tokens.

    logits: [vocab]; known: the first of them the prompt, for penalties.
    """
    changed = logits.tolist()
    for token, bias in params.logit_bias:
        changed[token] += bias
    for token in set(known):
        repetition = params.repetition_penalty
        changed[token] *= repetition if changed[token] < 0 else 1 / repetition
        count = known[1:].count(token)
        changed[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    top = max(changed)
    weights = [math.exp((x - top) / params.temperature) for x in changed]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: params.top_k]
    kept, mass, total = [], 0.0, sum(weights[token] for token in ranked)
    for token in ranked:
        if mass < params.top_p * total and weights[token] >= params.min_p:
            kept.append(token)
        mass += weights[token]
    law = torch.zeros(len(weights), dtype=torch.float64)
    law[kept] = torch.tensor([weights[token] for token in kept], dtype=torch.float64)
    return law / law.sum()
