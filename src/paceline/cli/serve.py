"""`paceline serve`: an OpenAI-compatible HTTP server."""

import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.flags import asked_arguments, engine_flags, log_flags, log_to_stderr
from paceline.cli.lines import Lines
from paceline.cli.verb import Verb
from paceline.core.errors import ConfigError
from paceline.core.options.engine_options import MAX_QUEUED

if TYPE_CHECKING:
    from paceline.server.telemetry.spans import Exporter

STDOUT = 1
API_KEY = "PACELINE_API_KEY"
COUNT, SECONDS = click.IntRange(min=1), click.FloatRange(min=0.0)


class ClientWeight(click.ParamType):  # type: ignore[type-arg]
    """CLIENT=WEIGHT"""

    name = "weight"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        client, _, weight = str(value).rpartition("=")
        try:
            number = float(weight)
        except ValueError:
            number = 0.0
        if not client or not 0.0 < number < float("inf"):
            self.fail(f"must be CLIENT=WEIGHT with a weight above 0, got {value!r}", param, ctx)
        return client, number


def limit(
    flag: str, kind: "click.ParamType[Any]", default: float, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that bounds what the server takes; a test holds its default to ServerLimits."""
    return click.option(flag, type=kind, default=default, show_default=True, help=text)


def opened(path: str) -> int:
    """A descriptor that appends to a file, or stdout's for "-".  Raises ConfigError."""
    if path == "-":
        return STDOUT
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        remedy = "choose a file in a folder that can be written, or - for stdout"
        raise ConfigError.about(
            "--access-log", expected="a file that can be written", got=str(error), remedy=remedy
        ) from error


def exporter(endpoint: str) -> "Exporter":
    """What sends spans there.  Raises ConfigError where OpenTelemetry is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    except ImportError as error:
        raise ConfigError.about(
            "--otlp-endpoint",
            expected="given where OpenTelemetry's SDK and exporter are installed",
            got=str(error),
            remedy="pip install 'paceline[otel]', or leave the flag out",
        ) from error
    from paceline.server.telemetry.spans import Exporter

    return Exporter(endpoint)


def parser_flag(flag: str, name: str, text: str) -> Callable[..., Callable[..., Any]]:
    """A format's name, which the server checks: its formats are not imported for a help text."""
    text = f"{text}: auto, by the chat template; none; or a format's name."
    return click.option(flag, name, default="auto", show_default=True, metavar="NAME", help=text)


@click.command(
    cls=Verb,
    epilog="""\b
Examples:
  paceline serve
  PACELINE_API_KEY=secret paceline serve Qwen/Qwen3-8B --host 0.0.0.0 --ssl-certfile server.pem
  paceline serve path/to/checkpoint --served-model-name mine --max-model-len 8192

\b
Ask it something (the address is printed at start):
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "bundled", "prompt": "def fibonacci(n):", "max_tokens": 48}'

\b
From Python, with the openai package:
  OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any").chat.completions.create(
      model="bundled", messages=[{"role": "user", "content": "def fibonacci(n):"}])
""",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 for every interface.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 for any that is free.",
)
@click.option(
    "--served-model-name",
    default=None,
    help="Name of the model in requests.  [default: as --model]",
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar=API_KEY,
    show_envvar=True,
    help="Key that requests must bring, but for /health, /ready and the files of the page at /; of "
    "several, in the environment apart by blanks, each is a client.  [default: none is asked for]",
)
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with more of them, one a line.",
)
@click.option(
    "--allow-no-key", is_flag=True, help="Listen where others reach it without asking for a key."
)
@click.option(
    "--allowed-origins",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin of web pages that may ask, as https://example.org, or * for all; may be repeated. "
    "[default: none]",
)
@click.option("--ssl-certfile", help="Certificate in PEM: TLS is spoken.  [default: none]")
@click.option("--ssl-keyfile", help="Its key in PEM.  [default: in the same file]")
@click.option(
    "--client-weight",
    "weights",
    multiple=True,
    type=ClientWeight(),
    metavar="CLIENT=WEIGHT",
    help="Tokens of a client for each of another, while both wait; CLIENT is an address, or key1 "
    "for the first of several keys.  [default: 1]",
)
@parser_flag("--tool-call-parser", "tool_parser", "How the model writes calls of tools")
@parser_flag("--reasoning-parser", "reasoning_parser", "How the model writes its reasoning")
@limit(
    "--max-queued-requests",
    click.IntRange(min=0),
    MAX_QUEUED,
    "Completions that may wait beside those that run; more are answered with 503.",
)
@limit(
    "--max-forms-per-client",
    COUNT,
    64,
    "Different forms of answers that requests of one client have at once; one more is a 429.",
)
@limit(
    "--max-forms",
    COUNT,
    256,
    "Those of all clients, the last eighth for who has none; one more is answered with 503.",
)
@limit("--max-body-mib", COUNT, 16, "Longest body of a request; else 413.  [MiB]")
@limit("--max-connections", COUNT, 4096, "Connections at once; one more is answered with 503.")
@limit(
    "--header-timeout",
    SECONDS,
    10.0,
    "For the headers, from a connection or the first byte of a request; else 408.  [s]",
)
@limit("--body-timeout", SECONDS, 60.0, "For the body behind its headers; else 408.  [s]")
@limit("--idle-timeout", SECONDS, 30.0, "How long an idle connection is kept.  [s]")
@limit("--write-timeout", SECONDS, 60.0, "How long a client may leave its answer unread.  [s]")
@limit("--drain-seconds", SECONDS, 20.0, "How long requests may go on once it shall stop.  [s]")
@limit(
    "--stuck-seconds",
    click.FloatRange(min=1.0),
    60.0,
    "How long the engine may be silent, in a turn say, before /health answers 503.  [s]",
)
@limit(
    "--load-stuck-seconds",
    click.FloatRange(min=1.0),
    1800.0,
    "How long a phase of the load may say nothing before /health answers 503.  [s]",
)
@click.option(
    "--access-log",
    type=click.Path(dir_okay=False, allow_dash=True),
    default=None,
    help="File that gets a line of JSON for every request; - for stdout.  [default: none]",
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    default=None,
    help="OpenTelemetry collector that gets a span of every request, by OTLP over HTTP, as "
    "http://127.0.0.1:4318; needs paceline[otel].  [default: none]",
)
@log_flags
@engine_flags
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> None:
    """Serve a model over HTTP, as the OpenAI API.

    Paths: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages,
    /v1/messages/count_tokens, /v1/embeddings, /v1/rerank, /v1/score, /v1/models, /capabilities,
    /version, /tokenize, /detokenize, /health, /ready, /progress, /metrics, /openapi.json; / is a
    page to try it with.
    Unknown or unsupported fields of a request are refused with 400, never ignored.  HTTP is one
    process, the engine another; the port answers while the model loads.

    Ctrl-C or SIGTERM: /ready answers 503, running requests end, then the process.  Exit code 1: the
    engine has failed, 70: something hangs.
    """
    asked = asked_arguments(values)
    from paceline.server.access.access import Access, read_keys
    from paceline.server.border.process import EngineProcess
    from paceline.server.limits import ServerLimits
    from paceline.server.run import Address, bind
    from paceline.server.run import serve as serve_until_stopped
    from paceline.server.tools.formats import Parsers

    lines = Lines()
    log = None if values["access_log"] is None else Lines(opened(values["access_log"]))
    log_to_stderr(values, lines, others=("asyncio", "opentelemetry", "uvicorn"))
    files = () if values["api_key_file"] is None else read_keys(values["api_key_file"])
    asks_blank = not values["api_keys"] and API_KEY in os.environ  # click takes it for none
    access = Access(
        api_keys=(*values["api_keys"], *((os.environ[API_KEY],) if asks_blank else ()), *files),
        origins=values["origins"],
        certfile=values["ssl_certfile"],
        keyfile=values["ssl_keyfile"],
    )
    access.require_safe(values["host"], allows_no_key=values["allow_no_key"])
    access.require_tls()
    endpoint = values["otlp_endpoint"]
    spans = None if endpoint is None else exporter(endpoint)
    address = Address(
        host=values["host"],
        port=values["port"],
        model=values["served_model_name"] or str(asked.get("model", "bundled")),
        access=access,
        weights=dict(values["weights"]),
        parsers=Parsers(tools=values["tool_parser"], reasoning=values["reasoning_parser"]),
        limits=ServerLimits(
            max_queued=values["max_queued_requests"],
            max_forms=values["max_forms"],
            max_forms_per_client=values["max_forms_per_client"],
            max_body_mib=values["max_body_mib"],
            max_connections=values["max_connections"],
            header_s=values["header_timeout"],
            body_s=values["body_timeout"],
            idle_s=values["idle_timeout"],
            write_s=values["write_timeout"],
            drain_s=values["drain_seconds"],
            stuck_s=values["stuck_seconds"],
            load_stuck_s=values["load_stuck_seconds"],
        ),
        log=None if log is None else log.write,
        trace=None if spans is None else spans.around,
    )
    with (
        closing(lines),
        nullcontext() if log is None else closing(log),
        nullcontext() if spans is None else closing(spans),
        bind(address) as bound,
        closing(
            EngineProcess(
                asked,
                stuck_s=address.limits.stuck_s,
                max_forms=address.limits.max_forms,
                max_forms_per_client=address.limits.max_forms_per_client,
            )
        ) as engine,
    ):
        failure = serve_until_stopped(
            engine, bound, address, tell=lambda text: lines.write(f"{text}\n")
        )
        lines.write("stopped\n" if failure is None else f"{failure}\n")
    ctx.exit(0 if failure is None else 1)
