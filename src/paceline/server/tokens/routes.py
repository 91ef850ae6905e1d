"""The routes of tokens."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response

from paceline.plan.machine import versions
from paceline.server.answer import Document, encoded
from paceline.server.asking import check_query, with_ignored
from paceline.server.bodies.body import body_schema
from paceline.server.bodies.reader import DETOKENIZE, TOKENIZE
from paceline.server.service import Service
from paceline.server.tokens.wire import DetokenizeRequest, TokenizeRequest


def add_tokens(app: FastAPI, service: Service) -> None:
    """Add /tokenize, /detokenize and /version."""

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        check_query(request)
        asked = await service.read(TOKENIZE, request)
        (tokens,), context = asked.prompts, service.reader.room.context_len
        told = {"tokens": tokens, "count": len(tokens), "max_model_len": context}
        return with_ignored(await _answer(told), asked)

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        check_query(request)
        (text,) = (await service.read(DETOKENIZE, request)).echoed
        return await _answer({"prompt": text})

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": versions()["paceline"] or "source"}


async def _answer(document: Document) -> Response:
    """Written beside the streams: it may be long."""
    return Response(await asyncio.to_thread(encoded, document), media_type="application/json")
