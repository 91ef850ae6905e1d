"""From an HTTP request to the answer of its job: what all endpoints that generate do."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute

from paceline.server.answer import Job, answer
from paceline.server.bodies.reader import Reading
from paceline.server.errors import ApiError
from paceline.server.parameters.ignored import HEADER
from paceline.server.service import Service
from paceline.server.stream import ClientGone
from paceline.server.telemetry.access_log import CLIENT_LEFT, Entry

_GONE = 499  # what nginx logs for a client that left; nobody reads it


class AskingRoute(APIRoute):
    """A route whose endpoint takes the request as it is and answers with a Response: there is
    nothing that FastAPI would have to find in one and make of the other."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        return self.endpoint


def add_asking(
    app: FastAPI, path: str, endpoint: Callable[[Request], Awaitable[Response]], **extra: Any
) -> None:
    """Add POST `path`, of an endpoint that generates.  extra: of the OpenAPI document."""
    app.router.add_api_route(
        path, endpoint, methods=["POST"], openapi_extra=extra, route_class_override=AskingRoute
    )


def check_query(request: Request) -> None:
    """Raise 400 for fields in the address, which would be ignored there."""
    for name in request.query_params:
        raise ApiError.about(
            name,
            expected="in the body",
            got="in the address",
            remedy="move it",
            param=name,
            code="unknown_parameter",
        )


async def answered(
    service: Service, endpoint: str, make_job: Callable[[Service, Reading], Job], request: Request
) -> Response:
    check_query(request)
    began = asyncio.get_running_loop().time()
    asked = await service.read(endpoint, request)
    entry = Entry.of(request)
    entry.params, entry.given, entry.is_stream = asked.params, asked.given, asked.stream
    job = replace(
        make_job(service, asked),
        share=service.share(request, asked.priority),
        deadline=None if asked.deadline_s is None else began + asked.deadline_s,
    )
    try:
        response = await answer(service, job, request)
    except ClientGone:
        entry.fault = CLIENT_LEFT
        return Response(status_code=_GONE)
    return with_ignored(response, asked)


def with_ignored(response: Response, asked: Reading) -> Response:
    """Say in a header what of the request was not read."""
    if asked.ignored:
        response.headers[HEADER] = ", ".join(asked.ignored)
    return response
