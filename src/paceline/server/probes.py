"""What a server says of itself to whoever looks after it.

/health: whether to restart it; /ready: whether to send it requests; /progress: how far it is.
"""

import json
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import message
from paceline.server.border.remote import LoadState, RemoteEngine
from paceline.server.errors import ApiError
from paceline.server.life import Life

_DONE = LoadState(phase="ready", percent=100.0, eta_s=0.0)


class Front:
    """An application that gives way to another: a server listens before its model is loaded."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def add_probes(app: FastAPI, engine: RemoteEngine, life: Life, *, is_loading: bool) -> None:
    """GET and HEAD /health, /ready and /progress."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        failure = engine.callers.failure
        if failure is not None:
            raise ApiError(503, failure, code="engine_failed")
        if engine.stuck is not None:
            raise ApiError(503, engine.stuck, code="engine_stuck")
        return _json({"status": "loading" if is_loading else "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        life.require()
        answer = await health()
        if is_loading:
            raise still_loading(engine)
        return answer

    @app.head("/progress", include_in_schema=False)
    @app.get("/progress")
    async def progress() -> Response:
        return _json(asdict(engine.progress() if is_loading else _DONE))


def still_loading(engine: RemoteEngine) -> ApiError:
    """What is asked before the engine is ready is answered with it."""
    progress = engine.progress()
    percent = progress.percent
    got = progress.phase if percent is None else f"{progress.phase}, {percent:.0f} %"
    remedy = "send it again when /ready says so; /progress says how far it is"
    text = message("the server", expected="ready", got=got, remedy=remedy)
    headers = {"Retry-After": str(max(1, round(progress.eta_s or 1.0)))}
    return ApiError(503, text, code="loading", headers=headers)


def _json(document: dict[str, Any]) -> Response:
    return Response(json.dumps(document), media_type="application/json")
