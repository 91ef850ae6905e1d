"""`paceline generate`: one prompt in, streamed text out."""

import json
from typing import Any

import click

from paceline.cli.console import engine_factory, print_stream, rate_line
from paceline.cli.flags import asked_options, engine_flags, log_to_stderr, sampling_flags


@click.command()
@click.option("--prompt", required=True, help="Text to continue.")
@sampling_flags(max_tokens=128)
@click.option("--echo", is_flag=True, help="Print the prompt before the completion.")
@click.option("--json", "as_json", is_flag=True, help="No streaming; one JSON document at the end.")
@engine_flags
@click.pass_context
def generate(ctx: click.Context, /, **values: Any) -> None:
    """Complete a prompt; the text goes to stdout, everything else to stderr."""
    log_to_stderr()
    llm = engine_factory(ctx)(**asked_options(values))
    try:
        _generate(llm, values)
    finally:
        llm.close()


def _generate(llm: Any, values: dict[str, Any]) -> None:
    from paceline.core.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        top_k=values["top_k"],
        top_p=values["top_p"],
    )
    if values["as_json"]:
        output = llm.generate([values["prompt"]], params)[0]
        click.echo(json.dumps(output.as_document()))
    else:
        if values["echo"]:
            click.echo(values["prompt"], nl=False)
        output = print_stream(llm.generate([values["prompt"]], params, stream=True))
        click.echo(rate_line(output.metrics), err=True)
    if output.outputs[0].finish_reason == "error":
        raise click.ClickException(str(output.outputs[0].error))
