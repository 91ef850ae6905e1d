"""`paceline bench`: what this machine does, with its JSON document as the last line."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from paceline.bench.attention_shape import FLAGS as ATTENTION_FLAGS
from paceline.bench.latency_shape import FLAGS as LATENCY_FLAGS
from paceline.bench.latency_shape import LatencyShape
from paceline.bench.page import Report, page
from paceline.bench.serve.shape import FLAGS as SERVE_FLAGS
from paceline.bench.serve.shape import LoadShape
from paceline.bench.speculative_shape import FLAGS as SPECULATIVE_FLAGS
from paceline.bench.speculative_shape import SpeculativeShape
from paceline.bench.traffic.shape import FLAGS as TRAFFIC_FLAGS
from paceline.bench.traffic.shape import TrafficShape
from paceline.cli.flags import (
    asked_arguments,
    data_flags,
    engine_flags,
    log_flags,
    log_to_stderr,
)
from paceline.cli.interrupts import end_of_run
from paceline.cli.verb import Verbs, examples


def output_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that say what is made of the document."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
    as_page = click.option(
        "--html",
        "page_file",
        type=click.File("w", encoding="utf-8", lazy=False),  # fails before the bench runs
        default=None,
        help="Also draw the results, on a page of its own in this file.",
    )
    return as_json(as_page(command))


def _show(
    ctx: click.Context,
    report: Report,
    values: Mapping[str, Any],
    *,
    where: Callable[[Mapping[str, Any]], str] = lambda document: document["device"]["name"],
) -> None:
    """Print what was found, draw it where that was asked, and end.  where: it was found, read from
    the document."""
    document = report.to_json()
    if values["page_file"] is not None:
        title = f"paceline bench {ctx.info_name} on {where(document)}"
        values["page_file"].write(page(title, document, report.drawings()))
    if not values["as_json"]:
        click.echo(report.table())
    click.echo(json.dumps(document))
    end_of_run(ctx, is_cut=report.is_cut)


@click.group(cls=Verbs)
def bench() -> None:
    """Time this machine."""


@bench.command(
    epilog=examples(
        "paceline bench latency",
        "paceline bench latency --model llama-3.1-8b --load-format dummy --batch-size 1,8,64",
        "paceline bench latency --batch-size 1 --input-len 128 --output-len 65 --json",
    )
)
@data_flags(LATENCY_FLAGS)
@output_flags
@log_flags
@engine_flags
@click.pass_context
def latency(ctx: click.Context, /, **values: Any) -> None:
    """Time to first token and decode rate of one batch at a time."""
    from paceline.bench.latency import bench_latency

    log_to_stderr(values)
    shape = LatencyShape.of(values)
    _show(ctx, bench_latency(asked_arguments(values), shape, make_llm=ctx.obj), values)


@bench.command(
    epilog=examples(
        "paceline bench speculative",
        "paceline bench speculative --speculative-algorithm NGRAM --repeats 5",
    )
)
@data_flags(SPECULATIVE_FLAGS)
@output_flags
@log_flags
@engine_flags
@click.pass_context
def speculative(ctx: click.Context, /, **values: Any) -> None:
    """Acceptance by position, tokens per round, and the speed-up over plain decoding.

    One prompt at a time on two engines, in turns, greedy; --gpu-memory-utilization is the share of
    each.  Texts that differ beyond ties are an error.  With --force-accept-len hardware is
    compared, and every line says that it was forced.
    """
    from paceline.bench.speculative import bench_speculative

    log_to_stderr(values)
    shape = SpeculativeShape.of(values)
    _show(ctx, bench_speculative(asked_arguments(values), shape, make_llm=ctx.obj), values)


@bench.command(
    epilog=examples(
        "paceline bench throughput --num-requests 16 --repeats 1",
        "paceline bench throughput --model llama-3.1-8b --load-format dummy --html page.html",
        "paceline bench throughput --num-requests 8 --input-len 64 --output-len 16 --json",
    )
)
@data_flags(TRAFFIC_FLAGS)
@output_flags
@log_flags
@engine_flags
@click.pass_context
def throughput(ctx: click.Context, /, **values: Any) -> None:
    """Tokens per second and waits under traffic, and where the time of turns goes.

    One pass right behind boot, the same requests again, whose tokens must be the same, and
    --repeats steady ones.  --seed is also that of lengths, tokens and arrivals.
    """
    from paceline.bench.throughput import bench_throughput

    log_to_stderr(values)
    _show(ctx, bench_throughput(asked_arguments(values), TrafficShape.of(values)), values)


@bench.command(
    epilog=examples(
        "paceline bench attention --device cpu --batch-size 2 --kv-len 256",
        "paceline bench attention --backends triton,flashinfer --json",
    )
)
@data_flags(ATTENTION_FLAGS)
@output_flags
@click.pass_context
def attention(ctx: click.Context, /, **values: Any) -> None:
    """Attention alone, checked against its definition and timed beside a peer library."""
    from paceline.bench.attention import bench_values

    _show(ctx, bench_values(values), values)


@bench.command(
    epilog="""\b
Examples:
  paceline bench serve                              a server of the bundled model, started for it
  paceline bench serve --num-requests 200 -- Qwen/Qwen3-8B --max-num-seqs 64
  paceline bench serve --base-url http://127.0.0.1:8000/v1 --request-rate 4 --html page.html
  paceline bench serve --base-url https://host/v1 --endpoint chat --concurrency 32 --natural-end
  paceline bench serve --dataset sharegpt.json --slo-ttft 500 --slo-inter-token 50

\b
Which loop:
  --request-rate R  open: requests come whether or not earlier ones have ended, as users do; when
                    the server is too slow the queue grows and waits tell it
  --concurrency N   closed: N clients, each with one request at a time; shows what a server can
                    give, and hides waits: a slow server is asked less

\b
What is told:
  ttft         from when a request was due (not: sent) to the first event with text
  inter-token  (last event - first) / (output tokens - 1), of each request
  gap          between two events of a stream; one may bring several tokens
  queue        from arrival to the first step, where the server says so
  late         how late the client itself sent: if it is not near 0, the client is the limit
  goodput      answers per second that keep every --slo-...; failed ones keep none
"""
)
@click.argument("words", metavar="[-- SERVE_ARGS]...", nargs=-1)
@click.option(
    "--base-url",
    default=None,
    help="Server to ask, any that speaks the OpenAI API, up to /v1.  [default: `paceline serve "
    "SERVE_ARGS` is started, and ended behind]",
)
@click.option(
    "--model", default=None, help="Name to ask for.  [default: the first of the server's list]"
)
@click.option(
    "--api-key",
    default=None,
    envvar="PACELINE_API_KEY",
    show_envvar=True,
    help="Bearer token that requests bring.",
)
@data_flags(SERVE_FLAGS)
@output_flags
@log_flags
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> None:
    """A server under load: waits, rates and goodput as a client sees them.

    First the same prompts are sent twice at temperature 0, and their texts must be equal.  Tokens
    are the server's own counts (usage); texts have about the asked lengths.  Ctrl-C shows what
    there is by then.
    """
    from paceline.bench.serve.bench import bench_serve

    log_to_stderr(values)
    report = bench_serve(
        LoadShape.of(values),
        base_url=values["base_url"],
        model=values["model"],
        api_key=values["api_key"],
        words=values["words"],
    )
    _show(ctx, report, values, where=lambda document: document["server"]["base_url"])
