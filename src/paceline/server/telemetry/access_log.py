"""AccessLog: a line of JSON for every request, whose writing neither waits nor raises.

{time, id, client, method, path, status, latency_s}, and of what was generated {prompt_tokens,
cached_tokens, output_tokens, ttft_s, finish}; status is 499 where the client left before a whole
answer, null where it left before its body was read.  A stream that it left has the 200 it began
with.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput

CLIENT_LEFT = "client_left"
_KEY = "paceline.entry"
_LOGGED = ("prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "finish")


@dataclass(slots=True, kw_only=True)
class Entry:
    """What a request has asked for and been answered so far."""

    params: SamplingParams | None = None  # None: nothing for the engine
    given: tuple[str, ...] = ()  # names of `params` that the client gave a value
    is_stream: bool = False
    response_id: str = ""
    fault: str | None = None  # what ended an answer after its request was read
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None  # of the first of its prompts
    finish: list[str] = field(default_factory=list)  # of its completions, as they ended

    @classmethod
    def of(cls, request: Request) -> "Entry":
        """The one that is logged, where requests are."""
        return cls.within(request.scope)

    @classmethod
    def within(cls, scope: Scope) -> "Entry":
        """The same, made where there is none."""
        entry: Entry = scope.setdefault(_KEY, cls())
        return entry

    def generated(self) -> dict[str, Any]:
        """What the log says of it."""
        return {name: getattr(self, name) for name in _LOGGED}

    def add(self, growth: RequestOutput) -> None:
        """More of an answer."""
        self.output_tokens += sum(len(each.token_ids) for each in growth.outputs)
        self.finish += [each.finish_reason for each in growth.outputs if each.finish_reason]
        metrics = growth.metrics
        if metrics is not None:
            self.prompt_tokens += metrics.prompt_tokens
            self.cached_tokens += metrics.cached_tokens
            times = (self.ttft_s, metrics.ttft_s)
            self.ttft_s = min((each for each in times if each is not None), default=None)


class AccessLog:
    """ASGI middleware.  write: takes a line."""

    def __init__(self, app: ASGIApp, *, write: Callable[[str], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = Entry.within(scope)
        when, began = time.time(), time.perf_counter()
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            line: dict[str, Any] = {
                "time": round(when, 3),
                "id": scope["request_id"],
                "client": scope["client"][0] if scope["client"] else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "latency_s": round(time.perf_counter() - began, 6),
            }
            self._write(json.dumps(line | entry.generated()) + "\n")
