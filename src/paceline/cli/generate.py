"""`paceline generate`: one prompt in, streamed text out."""

import json
from collections.abc import Callable
from typing import Any

import click

from paceline.cli.flags import asked_options, engine_flags, log_to_stderr, sampling_flags


@click.command()
@click.option("--prompt", required=True, help="Text to continue.")
@sampling_flags
@click.option("--echo", is_flag=True, help="Print the prompt before the completion.")
@click.option("--json", "as_json", is_flag=True, help="No streaming; one JSON document at the end.")
@engine_flags
@click.pass_context
def generate(ctx: click.Context, **values: Any) -> None:
    """Complete a prompt; the text goes to stdout, everything else to stderr."""
    log_to_stderr()
    llm = engine_factory(ctx)(**asked_options(values))
    try:
        _generate(llm, values)
    finally:
        llm.close()


def engine_factory(ctx: click.Context) -> Callable[..., Any]:
    """`LLM`, or what the caller of the command put in its context instead."""
    if ctx.obj is not None:
        factory: Callable[..., Any] = ctx.obj
        return factory
    from paceline.engine.llm import LLM

    return LLM


def print_stream(stream: Any) -> Any:
    """Print each new piece of text; returns the last snapshot."""
    shown, snapshot = 0, None
    for snapshot in stream:
        text = snapshot.outputs[0].text
        click.echo(text[shown:], nl=False)
        shown = len(text)
    click.echo()
    return snapshot


def rate_line(metrics: Any) -> str:
    """How long it took, for people."""
    rate = "-" if metrics.decode_tok_s is None else f"{metrics.decode_tok_s:.1f}"
    wait = "-" if metrics.ttft_s is None else f"{1e3 * metrics.ttft_s:.0f}"
    return f"{metrics.output_tokens} tokens, {rate} tokens/s, first after {wait} ms"


def _generate(llm: Any, values: dict[str, Any]) -> None:
    from paceline.core.sampling_params import SamplingParams
    from paceline.engine.outputs import to_json

    params = SamplingParams(
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        top_k=values["top_k"],
        top_p=values["top_p"],
    )
    if values["as_json"]:
        output = llm.generate([values["prompt"]], params)[0]
        click.echo(json.dumps(to_json(output)))
    else:
        if values["echo"]:
            click.echo(values["prompt"], nl=False)
        output = print_stream(llm.generate([values["prompt"]], params, stream=True))
        click.echo(rate_line(output.metrics), err=True)
    if output.outputs[0].finish_reason == "error":
        raise click.ClickException(str(output.outputs[0].error))
