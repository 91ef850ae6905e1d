"""The ASGI application: paths, keys, and when the engine starts and stops."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from paceline.plan.machine import versions
from paceline.server.access.access import OPEN_ACCESS, Access
from paceline.server.asking import answered
from paceline.server.body import body_schema
from paceline.server.chat import chat_job
from paceline.server.completions import completion_job
from paceline.server.errors import ApiError, add_error_handlers
from paceline.server.life import Doorkeeper
from paceline.server.limits import LIMITS, BodyLimit, Lengths, ServerLimits
from paceline.server.messages.routes import add_messages
from paceline.server.meters import CONTENT_TYPE
from paceline.server.parameters.table import capabilities
from paceline.server.reader import CHAT, COMPLETIONS
from paceline.server.request_id import RequestIds
from paceline.server.responses.routes import add_responses
from paceline.server.service import Service
from paceline.server.tokens.routes import add_tokens
from paceline.server.wire import ChatRequest, CompletionRequest


def build_app(
    service: Service, *, access: Access = OPEN_ACCESS, limits: ServerLimits = LIMITS
) -> FastAPI:
    """The application.  With keys, all paths but those of probes ask for one."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.worker.close()
        await service.engine.stop()

    app = FastAPI(title="paceline", version=versions()["paceline"] or "source", lifespan=lifespan)
    add_error_handlers(app)
    _add_generation(app, service)
    _add_models(app, service)
    add_tokens(app, service)
    add_messages(app, service)
    add_responses(app, service)

    _add_probes(app, service)
    _add_metrics(app, service)
    app.add_middleware(Doorkeeper, life=service.life)
    app.add_middleware(BodyLimit, limits=limits)
    access.guard(app)
    app.add_middleware(Lengths)
    app.add_middleware(RequestIds)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await answered(service, COMPLETIONS, completion_job, request)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await answered(service, CHAT, chat_job, request)


def _add_probes(app: FastAPI, service: Service) -> None:
    """/health: whether to restart it; /ready: whether to send it requests."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        if service.engine.failure is not None:
            raise ApiError(503, service.engine.failure, code="engine_failed")
        return Response('{"status":"ok"}', media_type="application/json")

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        service.life.require()
        return await health()


def _add_metrics(app: FastAPI, service: Service) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.meters.page(await service.look()), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/capabilities")
    async def what_is_taken() -> dict[str, Any]:
        return capabilities()

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.describe()]}

    # The name is read off the path here: a parameter of the function would promise a 422 that is
    # never sent.
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}", openapi_extra={"parameters": [name]})
    async def model(request: Request) -> dict[str, Any]:
        service.reader.check_model(request.path_params["name"])
        return service.describe()
