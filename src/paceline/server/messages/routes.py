"""The routes of messages."""

from typing import Any

from fastapi import FastAPI, Request, Response

from paceline.server.answer import Job, encoded
from paceline.server.asking import add_asking, answered, check_query, with_ignored
from paceline.server.bodies.body import body_schema
from paceline.server.bodies.reader import COUNT, MESSAGES, Reading
from paceline.server.messages.wire import CountRequest, MessagesRequest
from paceline.server.messages.writer import MessagesWriter
from paceline.server.service import Service


def add_messages(app: FastAPI, service: Service) -> None:
    """Add /v1/messages and /v1/messages/count_tokens."""

    async def messages(request: Request) -> Response:
        return await answered(service, MESSAGES, _job, request)

    add_asking(app, "/v1/messages", messages, **body_schema(MessagesRequest))

    @app.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest))
    async def count_tokens(request: Request) -> Response:
        return await _count(service, request)


def _job(service: Service, asked: Reading) -> Job:
    return Job.of(asked, MessagesWriter(asked.form, len(asked.prompts[0])))


async def _count(service: Service, request: Request) -> Response:
    check_query(request)
    asked = await service.read(COUNT, request)
    told: dict[str, Any] = {"input_tokens": len(asked.prompts[0])}
    return with_ignored(Response(encoded(told), media_type="application/json"), asked)
