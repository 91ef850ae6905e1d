"""Errors as the OpenAI API shows them: {"error": {"message", "type", "param", "code"}}; below
/v1/messages as the Anthropic API does: {"type": "error", "error": {"type", "message"}}.

Status codes: 400 for a wrong request, 401 for a wrong key, 404 for an unknown model or path, 405
for a wrong method, 408 for what does not come in time, 413 for a body that is too long, 429 for a
client that has as much at once as it may, 500 for what went wrong here, 503 from a server that
stops, whose queue is full or that has as many forms of answers as it may, and from /health of an
engine that has ended, 504 for a request whose deadline has passed.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Self

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from paceline.core.errors import (
    BusyError,
    CapacityError,
    DeadlineError,
    FormsError,
    ModelError,
    PacelineError,
    RequestError,
    ShareError,
    message,
)

MESSAGES_PATH = "/v1/messages"  # of the Anthropic API
_MAX_TEXT = 600  # characters of a refusal
_TYPES = {  # of the Anthropic API
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer that is not 200."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers
        self.param = param
        self.code = code

    @classmethod
    def about(
        cls,
        name: str,
        *,
        expected: object,
        got: object,
        remedy: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> Self:
        """One whose text is `core.errors.message` of the first four; it is a 400 unless said."""
        text = message(name, expected=expected, got=got, remedy=remedy)
        return cls(status, text, param=param, code=code)

    def called(self, names: Mapping[str, str]) -> Self:
        """The same about a field as its client calls it.  names: a regular expression of a param to
        what stands for it."""
        param = self.param or ""
        found = (each for each in names if re.fullmatch(each, param))
        pattern = next(found, None)
        if pattern is None:
            return self
        own = re.sub(f"^{pattern}$", names[pattern], param)
        told = str(self)
        text = own + told.removeprefix(param) if told.startswith(param) else told
        return type(self)(self.status, text, param=own, code=self.code, headers=self.headers)

    def document(self, path: str = "") -> dict[str, Any]:
        """The body, as clients of that path read it."""
        if f"{path}/".startswith(f"{MESSAGES_PATH}/"):
            told = {"type": _TYPES.get(self.status, "api_error"), "message": str(self)}
            return {"type": "error", "error": told}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str = "") -> Response:
        """ASCII JSON: what a client sent may hold what UTF-8 cannot."""
        return Response(
            json.dumps(self.document(path)),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )


def as_api_error(error: PacelineError) -> ApiError:
    """What the engine raised, as an answer."""
    if isinstance(error, FormsError):
        return ApiError(503, str(error), code="too_many_forms", headers={"Retry-After": "1"})
    if isinstance(error, BusyError):
        return ApiError(503, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ShareError):
        return ApiError(429, str(error), code="too_much_at_once", headers={"Retry-After": "1"})
    if isinstance(error, DeadlineError):
        return ApiError(504, str(error), code="deadline_exceeded")
    if not isinstance(error, RequestError | ModelError):
        return ApiError(500, str(error), code="engine_failed")
    code = "capacity_exceeded" if isinstance(error, CapacityError) else None
    text = str(error)
    if len(text) > _MAX_TEXT:  # it quotes what the client sent
        text = f"{text[: _MAX_TEXT // 2]} ... {text[-_MAX_TEXT // 2 :]}"
    return ApiError(400, text, param=_named_by(text), code=code)


def of_bug(error: Exception) -> ApiError:
    """What nobody raised on purpose; whoever tells it raises it again, for the log."""
    return ApiError(500, f"{type(error).__name__}: {error}; the server's log has more")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of `app` the one shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(PacelineError, _on_paceline_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), error
    return error.response(request.url.path)


async def _on_paceline_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError), error
    return as_api_error(error).response(request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    text = error.detail
    if error.status_code in (404, 405):
        where = f"{request.method} {request.url.path}"
        text = f"{where}: {text}; the paths are listed in /openapi.json"
    return ApiError(error.status_code, text, headers=error.headers).response(request.url.path)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The server closes the connection behind a bug, so the client must not use it again."""
    response = of_bug(error).response(request.url.path)
    response.headers["Connection"] = "close"
    return response


def _named_by(text: str) -> str | None:
    """The field an error of `core.errors.message` is about: its first word, when it is a name."""
    name = text.partition(" must be ")[0].partition("[")[0].partition(".")[0]
    return name if name.isidentifier() else None
