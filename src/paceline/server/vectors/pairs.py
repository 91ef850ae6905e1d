"""The routes of scores of pairs: /v1/rerank and /v1/score."""

from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from paceline.core.model.config import IDENTITY
from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.llm.ends.labels import scores_of
from paceline.server.answer import Document, Envelope, Job, TokenCounts, WholeWriter
from paceline.server.asking import answered
from paceline.server.bodies.body import body_schema
from paceline.server.bodies.reader import RERANK, SCORE, Reading
from paceline.server.errors import ApiError
from paceline.server.service import Service
from paceline.server.vectors.wire import RerankRequest, ScoreRequest


def add_pairs(app: FastAPI, service: Service) -> None:
    """Add both."""

    @app.post("/v1/rerank", openapi_extra=body_schema(RerankRequest))
    async def rerank(request: Request) -> Response:
        _require_scores(service)
        return await answered(service, RERANK, _rerank_job, request)

    @app.post("/v1/score", openapi_extra=body_schema(ScoreRequest))
    async def score(request: Request) -> Response:
        _require_scores(service)
        return await answered(service, SCORE, _score_job, request)


def _require_scores(service: Service) -> None:
    """Raise ApiError, before a body is read, unless the model makes one score of a pair."""
    made = service.vectors
    if made.label_act is None:
        got, remedy = f"one that does {', '.join(service.ends)}", "serve a cross-encoder"
        raise _other_model("one that scores pairs", got, remedy)
    if made.width != 1:
        remedy = "ask LLM.score_pairs, or serve a cross-encoder"
        raise _other_model("one with one label", f"one with {made.width}", remedy)


def _other_model(expected: str, got: str, remedy: str) -> ApiError:
    return ApiError.about("model", expected=expected, got=got, remedy=remedy, param="model")


def _rerank_job(service: Service, asked: Reading) -> Job:
    score = _scorer(service, asked)
    return Job.of(asked, RerankWriter(score, top_n=asked.top_n, documents=asked.echoed))


def _score_job(service: Service, asked: Reading) -> Job:
    return Job.of(asked, ScoreWriter(_scorer(service, asked)))


def _scorer(service: Service, asked: Reading) -> Callable[[bytes], float]:
    """From what was pooled of a pair to its score."""
    own = service.vectors.label_act
    assert own is not None, "others were refused"
    act = IDENTITY if asked.raw else own

    def score(pooled: bytes) -> float:
        [found] = scores_of(pooled, act)
        return found

    return score


class _PairsWriter(WholeWriter):
    """kind: the `object` of the answer."""

    kind = "list"

    def __init__(self, score: Callable[[bytes], float]) -> None:
        self._score = score

    def scored(self, growth: RequestOutput) -> float:
        assert growth.pooled is not None, "it ended in a score"
        return self._score(growth.pooled)


class RerankWriter(_PairsWriter):
    """Documents by their scores, the best first, equal ones as they were sent."""

    id_prefix = "rerank-"

    def __init__(
        self, score: Callable[[bytes], float], *, top_n: int | None, documents: list[str]
    ) -> None:
        """documents: to be told with their scores; none: they are not."""
        super().__init__(score)
        self._top_n = top_n
        self._documents = documents

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        told = {"index": index, "relevance_score": self.scored(growth)}
        return told | ({"document": {"text": self._documents[index]}} if self._documents else {})

    def document(
        self, envelope: Envelope, choices: list[Document], counts: TokenCounts
    ) -> Document:
        ranked = sorted(choices, key=lambda choice: -choice["relevance_score"])
        return self.around(envelope, counts) | {"results": ranked[: self._top_n]}


class ScoreWriter(_PairsWriter):
    """Scores in the order of the pairs."""

    id_prefix = "score-"

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        return {"index": index, "object": "score", "score": self.scored(growth)}

    def document(
        self, envelope: Envelope, choices: list[Document], counts: TokenCounts
    ) -> Document:
        return self.around(envelope, counts) | {"data": choices}
