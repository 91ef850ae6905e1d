"""The routes of tokens."""

from typing import Any

from fastapi import FastAPI, Request

from paceline.plan.machine import versions
from paceline.server.asking import check_query
from paceline.server.body import body_schema
from paceline.server.reader import DETOKENIZE, TOKENIZE
from paceline.server.service import Service
from paceline.server.tokens.wire import DetokenizeRequest, TokenizeRequest


def add_tokens(app: FastAPI, service: Service) -> None:
    """Add /tokenize, /detokenize and /version."""

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        check_query(request)
        (tokens,) = (await service.read(TOKENIZE, request)).prompts
        context = service.reader.room.context_len
        return {"tokens": tokens, "count": len(tokens), "max_model_len": context}

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        check_query(request)
        (text,) = (await service.read(DETOKENIZE, request)).echoed
        return {"prompt": text}

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": versions()["paceline"] or "source"}
