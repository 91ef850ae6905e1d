"""`paceline serve`: an OpenAI-compatible HTTP server."""

from typing import Any

import click

from paceline.cli.console import engine_factory
from paceline.cli.flags import asked_arguments, engine_flags, log_flags, log_to_stderr
from paceline.cli.verb import Verb
from paceline.core.options import MAX_QUEUED


@click.command(
    cls=Verb,
    epilog="""\b
Examples:
  paceline serve
  PACELINE_API_KEY=secret paceline serve Qwen/Qwen3-8B --host 0.0.0.0
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
    default=None,
    envvar="PACELINE_API_KEY",
    show_envvar=True,
    help="Key that requests under /v1 must bring.  [default: none is asked for]",
)
@click.option(
    "--max-queued-requests",
    type=click.IntRange(min=0),
    default=MAX_QUEUED,
    show_default=True,
    help="Completions that may wait beside those that run; more are answered with 503.",
)
@click.option(
    "--max-body-mib",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Longest body of a request; a longer one is answered with 413.  [MiB]",
)
@log_flags
@engine_flags
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> None:
    """Serve a model over HTTP, as the OpenAI API.

    Paths: /v1/completions, /v1/chat/completions, /v1/models, /health.  Unknown or unsupported
    fields of a request are refused with 400, never ignored.
    """
    asked = asked_arguments(values)
    from paceline.server.limits import ServerLimits
    from paceline.server.run import Address, bind
    from paceline.server.run import serve as serve_until_stopped

    log_to_stderr(values)
    address = Address(
        host=values["host"],
        port=values["port"],
        model=values["served_model_name"] or str(asked.get("model", "bundled")),
        api_key=values["api_key"],
        limits=ServerLimits(
            max_queued=values["max_queued_requests"], max_body_mib=values["max_body_mib"]
        ),
    )
    with bind(address) as bound:
        llm = engine_factory(ctx)(**asked)
        try:
            serve_until_stopped(llm, bound, address, tell=lambda text: click.echo(text, err=True))
        finally:
            llm.close()
    click.echo("stopped", err=True)
