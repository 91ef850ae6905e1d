"""The route of responses."""

import json

from fastapi import FastAPI, Request, Response

from paceline.server.answer import Job
from paceline.server.asking import add_asking, answered
from paceline.server.bodies.body import body_schema
from paceline.server.bodies.reader import RESPONSES, Reading
from paceline.server.responses.wire import ResponsesRequest
from paceline.server.responses.writer import ResponsesWriter
from paceline.server.service import Service


def add_responses(app: FastAPI, service: Service) -> None:
    """Add /v1/responses."""

    async def responses(request: Request) -> Response:
        return await answered(service, RESPONSES, _job, request)

    add_asking(app, "/v1/responses", responses, **body_schema(ResponsesRequest))


def _job(service: Service, asked: Reading) -> Job:
    tokenizer = service.reader.require_tokenizer()
    return Job.of(asked, ResponsesWriter(asked.form, json.loads(asked.told), tokenizer))
