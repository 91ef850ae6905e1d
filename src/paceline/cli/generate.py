"""`paceline generate`: one prompt in, streamed text out."""

import json
import sys
from typing import Any

import click

from paceline.cli.console import print_stream, rate_line, start_engine
from paceline.cli.flags import asked_options, engine_flags, log_to_stderr, sampling_flags
from paceline.cli.verb import Verb


@click.command(cls=Verb)
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--n", type=int, default=1, show_default=True, help="Completions of the prompt.")
@click.option(
    "--prompt-logprobs",
    type=int,
    default=None,
    help="With --json: log-probabilities of the prompt's tokens, and of so many most likely ones.",
)
@click.option(
    "--extra-args", default=None, help="Arguments of logits processors, as one JSON object."
)
@sampling_flags(max_tokens=128)
@click.option(
    "--show-draft",
    is_flag=True,
    help="Show accepted drafts in green, or in [brackets] where the output is no terminal; and at "
    "the end how many there were.",
)
@click.option("--echo", is_flag=True, help="Print the prompt before the completion.")
@click.option("--json", "as_json", is_flag=True, help="No streaming; one JSON document at the end.")
@engine_flags
@click.pass_context
def generate(ctx: click.Context, /, **values: Any) -> None:
    """Complete a prompt; the text goes to stdout, everything else to stderr."""
    log_to_stderr()
    if values["prompt_logprobs"] is not None and not values["as_json"]:
        raise click.UsageError("--prompt-logprobs shows in the JSON document only: add --json")
    if values["show_draft"] and (values["as_json"] or values["n"] > 1):
        raise click.UsageError("--show-draft streams one completion: drop --json and --n")
    params = _sampling_params(values)
    llm = start_engine(
        ctx,
        asked_options(values),
        check=lambda admission: admission.admit([values["prompt"]], params),
    )
    try:
        _generate(llm, params, values)
    finally:
        llm.close()


def _sampling_params(values: dict[str, Any]) -> Any:
    from paceline.core.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        top_k=values["top_k"],
        top_p=values["top_p"],
        n=values["n"],
        prompt_logprobs=values["prompt_logprobs"],
        extra_args=_extra_args(values["extra_args"]),
    )


def _generate(llm: Any, params: Any, values: dict[str, Any]) -> None:
    if values["as_json"]:
        output = llm.generate([values["prompt"]], params)[0]
        forced = values["force_accept_len"]
        told = {} if forced is None else {"forced_tokens_per_round": forced}
        click.echo(json.dumps(output.as_document() | told))
    elif params.n > 1:
        output = llm.generate([values["prompt"]], params)[0]
        _print_all(output, values)
    else:
        if values["echo"]:
            click.echo(values["prompt"], nl=False)
        output = _print_one(llm, llm.generate([values["prompt"]], params, stream=True), values)
    failed = next((each for each in output.outputs if each.finish_reason == "error"), None)
    if failed is not None:
        raise click.ClickException(str(failed.error))


def _print_one(llm: Any, stream: Any, values: dict[str, Any]) -> Any:
    """Print a completion as it comes; returns the last snapshot."""
    forced = values["force_accept_len"] is not None
    if not values["show_draft"]:
        output = print_stream(stream)
        click.echo(rate_line(output.metrics, forced=forced), err=True)
        return output
    from paceline.cli.draft_stream import draft_line, print_drafted

    output = print_drafted(stream, llm.tokenizer, has_colour=sys.stdout.isatty())
    click.echo(rate_line(output.metrics, forced=forced), err=True)
    click.echo(draft_line(output.metrics), err=True)
    return output


def _extra_args(text: str | None) -> Any:
    """Raises BadParameter for what is no JSON; what it holds is checked with the parameters."""
    try:
        return {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"{text!r} is not JSON: {error}", param_hint="--extra-args") from (
            error
        )


def _print_all(output: Any, values: dict[str, Any]) -> None:
    """Several completions, each on its own."""
    echoed = values["prompt"] if values["echo"] else ""
    for completion in output.outputs:
        click.echo(f"completion {completion.index}", err=True)
        click.echo(echoed + completion.text)
    forced = values["force_accept_len"] is not None
    click.echo(rate_line(output.metrics, forced=forced), err=True)
