"""The routes of messages."""

import json
from collections.abc import Awaitable
from typing import Any

from fastapi import FastAPI, Request, Response

from paceline.core.errors import PacelineError
from paceline.server.answer import Job, encoded
from paceline.server.asking import answered, check_query
from paceline.server.body import body_schema
from paceline.server.errors import ApiError, as_api_error
from paceline.server.messages.wire import CountRequest, MessagesRequest
from paceline.server.messages.writer import MessagesWriter, fault_document
from paceline.server.reader import COUNT, MESSAGES, Reading
from paceline.server.service import Service


def add_messages(app: FastAPI, service: Service) -> None:
    """Add /v1/messages and /v1/messages/count_tokens."""

    @app.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        return await _said(answered(service, MESSAGES, _job, request))

    @app.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest))
    async def count_tokens(request: Request) -> Response:
        return await _said(_count(service, request))


def _job(service: Service, asked: Reading) -> Job:
    return Job.of(asked, MessagesWriter(asked.form, len(asked.prompts[0])))


async def _count(service: Service, request: Request) -> Response:
    check_query(request)
    asked = await service.read(COUNT, request)
    told: dict[str, Any] = {"input_tokens": len(asked.prompts[0])}
    return Response(encoded(told), media_type="application/json")


async def _said(answer: Awaitable[Response]) -> Response:
    """An answer whose errors are said as this API says them."""
    try:
        return await answer
    except ApiError as error:
        refused = error
    except PacelineError as error:
        refused = as_api_error(error)
    body = json.dumps(fault_document(refused))  # ASCII, as every refusal
    return Response(body, refused.status, headers=refused.headers, media_type="application/json")
