"""`--otlp-endpoint`: what a collector gets, read by OpenTelemetry's own types."""

import http.client
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner
from scripted import TEMPLATES, scripted_service
from serving import FIRST_WORDS, serving, small_llm, wait_until
from starlette.testclient import TestClient

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.engine.request import FinishReason
from paceline.server.app import build_app

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stop": ["!"], "temperature": 0.5}


@pytest.fixture
def spans():
    """The module; the extra brings what it needs."""
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from paceline.server.telemetry import spans

    return spans


class Collector:
    """Keeps what is sent to it; may be told not to answer."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answers = threading.Event()
        self.answers.set()
        self.has_come = threading.Event()

    def spans(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert told(resource.resource.attributes)["service.name"] == "paceline"
                for scope in resource.scope_spans:
                    yield from scope.spans


def told(attributes):
    def value(any_value):
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in attributes}


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/traces"
            collector.has_come.set()
            collector.answers.wait()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *values): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        collector.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def world(spans):
    """(client, what the collector has got, once all was sent)."""
    with collecting() as (collector, url):
        exporter = spans.Exporter(url)
        service = scripted_service(TEMPLATES["plain"])
        service.engine.texts = ["abcdef"]
        client = TestClient(
            build_app(service, trace=exporter.around), raise_server_exceptions=False
        )

        def sent():
            exporter.close()
            return list(collector.spans())

        yield client, sent, service


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_one_span_with_the_fields_of_the_convention(world, stream):
    client, sent, _ = world
    answer = client.post("/v1/chat/completions", json=CHAT | {"stream": stream, "seed": 7})
    assert answer.status_code == 200
    (span,) = sent()
    assert span.name == "chat tiny"
    assert span.kind == span.SPAN_KIND_SERVER
    assert span.end_time_unix_nano > span.start_time_unix_nano
    found = told(span.attributes)
    assert found["paceline.request.id"] == answer.headers["x-request-id"]
    assert (
        found
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.request.seed": 7,
            "gen_ai.request.stream": stream,
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.cache_read.input_tokens": 2,
            "gen_ai.usage.output_tokens": 2,
            "http.response.status_code": 200,
            "http.request.method": "POST",
            "url.path": "/v1/chat/completions",
        }
        == found
    )
    assert found["gen_ai.usage.input_tokens"] > 0
    assert found["gen_ai.response.id"] in answer.text
    assert "error.type" not in found
    for name in ("temperature", "max_tokens"):
        assert f"gen_ai.request.{name}" not in found, "it was not asked for"


def test_a_completion_says_what_it_was_asked(world):
    client, sent, _ = world
    client.post("/v1/completions", json=COMPLETION)
    (span,) = sent()
    assert span.name == "text_completion tiny"
    found = told(span.attributes)
    assert found["gen_ai.request.max_tokens"] == 3
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.stop_sequences"] == ["!"]


def test_a_trace_goes_on_and_is_told(world):
    client, sent, _ = world
    answer = client.post("/v1/completions", json=COMPLETION, headers={"traceparent": TRACE})
    begun = client.post("/v1/completions", json=COMPLETION)
    first, second = sent()
    _, trace_id, parent_id, _ = TRACE.split("-")
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (trace_id, parent_id)
    assert answer.headers["traceparent"] == f"00-{trace_id}-{first.span_id.hex()}-01"
    assert not second.parent_span_id
    own = f"00-{second.trace_id.hex()}-{second.span_id.hex()}-"  # and flags
    assert begun.headers["traceparent"].startswith(own)
    assert second.trace_id != first.trace_id


def test_what_is_refused_and_what_fails_are_told(world):
    client, sent, service = world
    client.post("/v1/completions", json={"model": "tiny"})
    service.engine.finish = FinishReason.ERROR
    client.post("/v1/completions", json=COMPLETION)
    client.post("/v1/completions", json=COMPLETION | {"stream": True})
    refused, failed, cut = sent()
    assert refused.name == "POST /v1/completions"
    assert told(refused.attributes)["error.type"] == "400"
    assert refused.status.code == refused.status.STATUS_CODE_UNSET
    assert told(failed.attributes)["error.type"] == "500"
    assert told(cut.attributes)["error.type"] == "generation_failed"
    for span in (failed, cut):
        assert span.status.code == span.status.STATUS_CODE_ERROR


def test_vectors_are_embeddings_and_nothing_is_said_of_sampling(world):
    """Nor is a number of tokens where an echo alone was asked for."""
    client, sent, service = world
    body = {"model": "tiny", "input": ["x"]}
    service.engine.finish = FinishReason.ERROR  # it makes no vectors
    client.post("/v1/embeddings", json=body)
    client.post("/v1/completions", json=COMPLETION | {"max_tokens": 0, "echo": True})
    vectors, echo = sent()
    assert vectors.name == "embeddings tiny"
    found = told(vectors.attributes)
    assert found["gen_ai.operation.name"] == "embeddings"
    for name in ("temperature", "max_tokens"):
        assert f"gen_ai.request.{name}" not in found
    found = told(echo.attributes)
    assert "gen_ai.request.max_tokens" not in found
    assert found["gen_ai.request.temperature"] == 0.5


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_told_as_a_fault(spans, stream):
    """By the spans of a real server: it leaves while the engine is held."""
    with collecting() as (collector, url):
        exporter = spans.Exporter(url)
        with serving(small_llm(), trace=exporter.around) as server:
            server.turns.hold(after=FIRST_WORDS if stream else 0)
            body = COMPLETION | {"max_tokens": 100, "stop": [], "stream": stream}
            with closing(http.client.HTTPConnection(server.url.removeprefix("http://"))) as client:
                headers = {"Content-Type": "application/json"}
                client.request("POST", "/v1/completions", json.dumps(body), headers)
                wait_until(lambda: len(server.engine.callers) == 1)
                if stream:
                    client.getresponse().readline()
            wait_until(lambda: not server.engine.callers)
            server.turns.go()
            wait_until(server.is_idle)
        exporter.close()
        (span,) = collector.spans()
    found = told(span.attributes)
    assert found["error.type"] == "client_left"
    assert found["http.response.status_code"] == (200 if stream else 499)
    assert span.status.code == span.status.STATUS_CODE_ERROR


def test_probes_and_pages_are_no_spans(world):
    client, sent, _ = world
    for path in ("/health", "/v1/models", "/"):
        answer = client.get(path, headers={"traceparent": TRACE})
        assert "traceparent" not in answer.headers
    assert sent() == []


def test_a_collector_that_does_not_answer_holds_up_no_end(spans, monkeypatch):
    monkeypatch.setattr(spans, "_FLUSH_S", 0.01)
    with collecting() as (collector, url):
        collector.answers.clear()
        exporter = spans.Exporter(url)
        service = scripted_service(None)
        service.engine.texts = ["a"]
        client = TestClient(build_app(service, trace=exporter.around))
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        exporter.close()
        assert not collector.answers.is_set()


def test_what_is_no_url_is_refused(spans):
    with pytest.raises(ConfigError, match="--otlp-endpoint must be a URL, as http://127"):
        spans.Exporter("127.0.0.1:4318")


def test_without_a_collector_nothing_is_traced():
    service = scripted_service(None)
    service.engine.texts = ["a"]
    answer = TestClient(build_app(service)).post(
        "/v1/completions", json=COMPLETION, headers={"traceparent": TRACE}
    )
    assert answer.status_code == 200
    assert "traceparent" not in answer.headers


def test_an_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    done = CliRunner().invoke(app, ["serve", "--otlp-endpoint", "http://127.0.0.1:4318"])
    assert done.exit_code == 2
    assert "--otlp-endpoint must be given where OpenTelemetry's SDK and exporter are" in done.stderr
    assert "pip install 'paceline[otel]'" in done.stderr
