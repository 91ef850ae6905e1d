"""Scores of pairs, by models with a classifier's head: what is asked of them, and what they answer.

The texts of a pair are encoded at once, as the tokenizer joins them: [CLS] query [SEP] document
[SEP].  Where the model tells the second text's tokens apart, it is told where they begin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.core.errors import RequestError
from paceline.core.modes import End
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.admission import Admission, AdmittedPrompt
from paceline.llm.inputs import as_batch, as_prompt
from paceline.models.classifier import SIGMOID


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
            raise _error("score", "asked of a model with one label", f"{len(self.scores)} labels")
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


def pair_prompts(admission: Admission, queries: object, documents: object) -> list[AdmittedPrompt]:
    """A prompt of each pair.  queries: one for all documents, or one for each.  Raises
    RequestError, of a model that scores no pairs, too."""
    admission.require_labels()
    texts, asked = as_batch(documents), as_batch(queries)
    if len(asked) == 1:
        asked *= len(texts)
    if len(asked) != len(texts):
        expected = f"one for all, or one for each of {len(texts)} documents"
        raise _error("queries", expected, str(len(asked)))
    joined = [_joined(admission, *pair) for pair in zip(asked, texts, strict=True)]
    return admitted_pairs(admission, joined)


def admitted_pairs(
    admission: Admission, joined: Sequence[tuple[Sequence[int], int]]
) -> list[AdmittedPrompt]:
    """joined: token ids of each pair, and where its second text begins.  Raises RequestError."""
    admitted = admission.admit_end([list(ids) for ids, _ in joined], End.POOL)
    if not admission.config.tells_types:
        return admitted
    return [
        replace(each, second_from=second)
        for each, (_, second) in zip(admitted, joined, strict=True)
    ]


def _joined(admission: Admission, query: object, document: object) -> tuple[list[int], int]:
    first, second = as_prompt(query), as_prompt(document)
    if isinstance(first, str) and isinstance(second, str):
        for text in (first, second):
            admission.check_fits(text)
        return admission.require_tokenizer().encode_pair(first, second)
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second], len(first)  # type: ignore[list-item]
    raise _error("a query and its document", "both texts or both token ids", "one of each")


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


def _error(name: str, expected: str, got: str) -> RequestError:
    return RequestError.about(name, expected=expected, got=got, remedy="see LLM.score_pairs")
