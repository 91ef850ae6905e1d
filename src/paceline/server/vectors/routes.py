"""The route of embeddings."""

import base64

from fastapi import FastAPI, Request, Response

from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.llm.ends.vectors import VectorParams
from paceline.server.answer import Document, Envelope, Job, TokenCounts, WholeWriter
from paceline.server.asking import answered
from paceline.server.bodies.body import body_schema
from paceline.server.bodies.reader import EMBEDDINGS, Reading
from paceline.server.service import Service
from paceline.server.vectors.pairs import add_pairs
from paceline.server.vectors.wire import EmbeddingsRequest


def add_vectors(app: FastAPI, service: Service) -> None:
    """Add /v1/embeddings, and those of pairs."""
    add_pairs(app, service)

    @app.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        return await answered(service, EMBEDDINGS, _job, request)


def _job(service: Service, asked: Reading) -> Job:
    """Raises RequestError for more dimensions than the model has."""
    wanted = asked.vector
    assert wanted is not None, "it was read as one"
    normalizes = service.vectors.normalizes if wanted.normalize is None else wanted.normalize
    params = VectorParams(dimensions=wanted.dimensions, normalize=normalizes)
    if (
        service.vectors.label_act is None and service.vectors.width
    ):  # otherwise the engine says what it does instead
        params.check(service.vectors.width)
    return Job.of(asked, EmbeddingsWriter(params, as_base64=wanted.as_base64))


class EmbeddingsWriter(WholeWriter):
    """A list of vectors; as_base64: of their float32, the lowest byte first."""

    id_prefix = "embd-"
    kind = "list"

    def __init__(self, params: VectorParams, *, as_base64: bool) -> None:
        self._params = params
        self._as_base64 = as_base64

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        assert growth.pooled is not None, "it ended in a vector"
        vector = self._params.of(growth.pooled)
        told: object = vector.tolist()
        if self._as_base64:
            told = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return {"object": "embedding", "index": index, "embedding": told}

    def document(
        self, envelope: Envelope, choices: list[Document], counts: TokenCounts
    ) -> Document:
        return self.around(envelope, counts) | {"data": choices}
