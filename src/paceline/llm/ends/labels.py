"""Scores of labels, from what the engine pooled to what a caller wants of it.  No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import RequestError
from paceline.core.model.config import SIGMOID
from paceline.engine.answers.outputs import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScore:
    """What a model makes of one pair."""

    scores: tuple[float, ...]  # [num_labels]
    prompt_token_ids: tuple[int, ...]  # of both texts
    cached_tokens: int  # of these, found in the prefix cache

    @property
    def score(self) -> float:
        """Of a model with one label, as cross-encoders are.  Raises RequestError for another."""
        if len(self.scores) != 1:
            raise RequestError.about(
                "score",
                expected="asked of a model with one label",
                got=f"{len(self.scores)} labels",
                remedy="read scores",
            )
        return self.scores[0]


def scores_of(pooled: bytes, act: str) -> tuple[float, ...]:
    """[num_labels] of what was pooled, float32, behind the activation."""
    raw = np.frombuffer(pooled, np.float32).tolist()
    if act != SIGMOID:
        return tuple(raw)
    return tuple([_sigmoid(value) for value in raw])


def _sigmoid(value: float) -> float:
    """exp never overflows: it is taken of what is at most 0."""
    small = math.exp(-abs(value))
    return (1.0 if value >= 0 else small) / (1.0 + small)


def pair_scores(outputs: Sequence[RequestOutput], act: str) -> list[PairScore]:
    """Of finished requests of `pair_prompts`.  Raises RequestError for one that failed."""
    return [_pair_score(output, act) for output in outputs]


def _pair_score(output: RequestOutput, act: str) -> PairScore:
    if output.pooled is None:
        raise RequestError(output.outputs[0].error or f"{output.request_id} was aborted")
    assert output.metrics is not None, "it is finished"
    return PairScore(
        scores=scores_of(output.pooled, act),
        prompt_token_ids=output.prompt_token_ids,
        cached_tokens=output.metrics.cached_tokens,
    )
