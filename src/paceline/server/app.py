"""The ASGI applications, of a server that loads and of one that is ready: paths and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp

from paceline.plan.machine import versions
from paceline.server.access.access import OPEN_ACCESS, Access
from paceline.server.asking import add_asking, answered
from paceline.server.bodies.body import body_schema
from paceline.server.bodies.reader import CHAT, COMPLETIONS
from paceline.server.bodies.wire import ChatRequest, CompletionRequest
from paceline.server.border.remote import RemoteEngine
from paceline.server.chat import chat_job
from paceline.server.completions import completion_job
from paceline.server.errors import add_error_handlers
from paceline.server.life import Doorkeeper, Life
from paceline.server.limits import LIMITS, BodyFraming, BodyLimit, ServerLimits
from paceline.server.messages.routes import add_messages
from paceline.server.parameters.table import capabilities
from paceline.server.playground.page import add_page
from paceline.server.probes import add_probes, still_loading
from paceline.server.request_id import RequestIds
from paceline.server.responses.routes import add_responses
from paceline.server.service import Service
from paceline.server.telemetry.access_log import AccessLog
from paceline.server.telemetry.meters import CONTENT_TYPE
from paceline.server.tokens.routes import add_tokens
from paceline.server.vectors.routes import add_vectors


class Tracing(Protocol):
    """Puts spans around an application; server.telemetry has one, where a collector is named."""

    def __call__(self, app: ASGIApp, *, model: str) -> ASGIApp: ...


_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def build_app(
    service: Service,
    *,
    access: Access = OPEN_ACCESS,
    limits: ServerLimits = LIMITS,
    log: Callable[[str], None] | None = None,
    trace: Tracing | None = None,
) -> ASGIApp:
    """The application of a server that is ready.  With keys, all paths but those of probes and of
    the page ask for one.  log: takes the lines of an access log.  trace: makes spans of requests
    for the model of that name."""
    app = _new_app()
    _add_generation(app, service)  # first: a path is looked for in this order
    add_page(app)
    _add_models(app, service)
    add_tokens(app, service)
    add_messages(app, service)
    add_responses(app, service)
    add_vectors(app, service)

    add_probes(app, service.engine, service.life, is_loading=False)
    _add_metrics(app, service)
    app.add_middleware(Doorkeeper, life=service.life)
    app.add_middleware(BodyLimit, limits=limits)
    traced = None if trace is None else partial(trace, model=service.model)
    return _guarded(app, access, log, traced)


def build_loading_app(
    engine: RemoteEngine,
    life: Life,
    *,
    access: Access = OPEN_ACCESS,
    log: Callable[[str], None] | None = None,
) -> ASGIApp:
    """The application of a server whose engine loads: the page, probes, and 503 for what else is
    asked."""
    app = _new_app()
    add_page(app)
    add_probes(app, engine, life, is_loading=True)

    @app.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def later() -> Response:
        raise still_loading(engine)

    return _guarded(app, access, log)


def _new_app() -> FastAPI:
    app = FastAPI(title="paceline", version=versions()["paceline"] or "source")
    add_error_handlers(app)
    return app


def _guarded(
    app: FastAPI,
    access: Access,
    log: Callable[[str], None] | None,
    traced: Callable[[ASGIApp], ASGIApp] | None = None,
) -> ASGIApp:
    access.guard(app)
    app.add_middleware(BodyFraming)
    # Around the whole application: its middleware is within what answers a bug with 500.
    around = app if traced is None else traced(app)
    return RequestIds(around if log is None else AccessLog(around, write=log))


def _add_generation(app: FastAPI, service: Service) -> None:
    async def completions(request: Request) -> Response:
        return await answered(service, COMPLETIONS, completion_job, request)

    async def chat_completions(request: Request) -> Response:
        return await answered(service, CHAT, chat_job, request)

    add_asking(app, "/v1/completions", completions, **body_schema(CompletionRequest))
    add_asking(app, "/v1/chat/completions", chat_completions, **body_schema(ChatRequest))


def _add_metrics(app: FastAPI, service: Service) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.meters.page(await service.engine.look()), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/capabilities")
    async def what_is_taken() -> dict[str, Any]:
        scores_pairs = service.vectors.label_act is not None
        return {"ends": service.ends, "scores_pairs": scores_pairs, **capabilities()}

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
