"""Spans: one for each request that asks for work, with OpenTelemetry's GenAI attributes.

Made and sent by the process of HTTP, in a thread of the exporter's.  A `traceparent` that came is
the span's parent, and the answer says the span's own.
"""

import threading
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import ConfigError
from paceline.core.request.sampling_params import SamplingParams
from paceline.plan.machine import versions
from paceline.server.telemetry.access_log import CLIENT_LEFT, Entry

_EXPORT_S = 5.0  # of a batch of spans
_FLUSH_S = 2.0  # for those that are left when the server ends
_PROPAGATOR = TraceContextTextMapPropagator()
_OPERATIONS = {  # else chats
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}
_ASKED = {  # by the name of a sampling parameter
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}


class Exporter:
    """Owns what sends spans to a collector."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: of OTLP over HTTP, without /v1/traces.  Raises ConfigError for what is none."""
        if not endpoint.startswith(("http://", "https://")):
            remedy = "name the collector's port for OTLP over HTTP, usually 4318"
            expected = "a URL, as http://127.0.0.1:4318"
            raise ConfigError.about(
                "--otlp-endpoint", expected=expected, got=repr(endpoint), remedy=remedy
            )
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_S)
        told = {"service.name": "paceline", "service.version": versions()["paceline"] or "source"}
        # Not at the end of the process, which nothing may hold up.
        self._provider = TracerProvider(resource=Resource.create(told), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))

    def around(self, app: ASGIApp, *, model: str) -> "Spans":
        """`app` with spans of its requests."""
        return Spans(app, tracer=self._provider.get_tracer("paceline.server"), model=model)

    def close(self) -> None:
        """Send what is left, unless that takes too long."""
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        flush.join(_FLUSH_S)


class Spans:
    """ASGI middleware.  model: the name clients ask for."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer, model: str) -> None:
        self._app = app
        self._tracer = tracer
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        entry = Entry.within(scope)
        came = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"POST {scope['path']}", context=_PROPAGATOR.extract(came), kind=SpanKind.SERVER
        )
        own: dict[str, str] = {}
        _PROPAGATOR.inject(own, set_span_in_context(span))
        returned = [(name.encode(), value.encode()) for name, value in own.items()]
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *returned]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._tell(span, scope, entry, status)
            span.end()

    def _tell(self, span: Span, scope: Scope, entry: Entry, status: int | None) -> None:
        """status: None: the client left before it."""
        path = scope["path"]
        told = {"http.request.method": "POST", "url.path": path}
        told |= {"paceline.request.id": scope["request_id"]}
        if status is not None:
            told["http.response.status_code"] = status
        if entry.params is not None:
            operation = _OPERATIONS.get(path, "chat")
            span.update_name(f"{operation} {self._model}")
            told |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "paceline"}
            told |= {"gen_ai.request.model": self._model, "gen_ai.response.model": self._model}
            told |= _asked(entry.params, entry.given) | _answered(entry)
        span.set_attributes(told)
        fault = entry.fault or (None if status is None or status < 400 else str(status))
        if status is None:
            fault = CLIENT_LEFT
        if fault is not None:
            span.set_attribute("error.type", fault)
        if status is None or status >= 500 or entry.fault:
            span.set_status(Status(StatusCode.ERROR))


def _asked(params: SamplingParams, given: Sequence[str]) -> dict[str, Any]:
    """What the request said, not what is usual."""
    found = {_ASKED[name]: getattr(params, name) for name in given if name in _ASKED}
    told = {name: value for name, value in found.items() if value is not None}
    if "stop" in given and params.stop:
        told["gen_ai.request.stop_sequences"] = list(params.stop)
    return told


def _answered(entry: Entry) -> dict[str, Any]:
    told: dict[str, Any] = {
        "gen_ai.request.stream": entry.is_stream,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": entry.cached_tokens,
        "gen_ai.usage.output_tokens": entry.output_tokens,
        "gen_ai.response.finish_reasons": entry.finish,
    }
    if entry.response_id:
        told["gen_ai.response.id"] = entry.response_id
    if entry.ttft_s is not None:
        told["gen_ai.response.time_to_first_chunk"] = entry.ttft_s
    return told
