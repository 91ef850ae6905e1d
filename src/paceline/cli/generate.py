"""`paceline generate`: prompts in, text out."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from paceline.cli.console import has_colour, print_stream, rate_line, start_engine, tell
from paceline.cli.flags import asked_arguments, engine_flags, log_flags, log_to_stderr
from paceline.cli.interrupts import interrupts, until_stopped
from paceline.cli.prompts import prompt_flags, read_prompts
from paceline.cli.sampling_flags import GREEDY, sampling_flags, sampling_params
from paceline.cli.structure_flags import asked_structure, structure_flags
from paceline.cli.verb import Verb, examples
from paceline.core.progress import INTERRUPTED, Progress


@click.command(
    cls=Verb,
    epilog=examples(
        "paceline generate --prompt 'def fibonacci(n):' --max-tokens 64",
        "paceline generate --prompt 'import os' --prompt 'import re' --stop '#' --json",
        "paceline generate --model Qwen/Qwen3-8B --chat --prompt 'Why is the sky blue?'",
        "echo 'class Stack:' | paceline generate --prompt - --temperature 0.7 --seed 1 --n 3",
        "paceline generate --prompt-file start.py --max-model-len 2k --quiet",
        "paceline generate --prompt 'x = ' --regex '[0-9]+'",
    ),
)
@prompt_flags
@sampling_flags(max_tokens=(128, "a first look wants some lines"), temperature=GREEDY)
@structure_flags
@click.option(
    "--show-draft",
    is_flag=True,
    help="Show accepted drafts in green, or in [brackets] where the output has no colour; and at "
    "the end how many there were.",
)
@click.option("--echo", is_flag=True, help="Print the prompt before the completion.")
@click.option(
    "--json", "as_json", is_flag=True, help="No streaming; one JSON document a prompt, each a line."
)
@log_flags
@engine_flags
@click.pass_context
def generate(ctx: click.Context, /, **values: Any) -> None:
    """Complete prompts; the text goes to stdout, everything else to stderr.

    Ctrl-C ends the answers, shows what there is, and exits with 130.
    """
    log_to_stderr(values)
    _refuse_unseen(values)
    # A seed that is typed is the request's own, as in the API.
    seed = {} if values["seed"] is None else {"seed": values["seed"]}
    params = sampling_params(values, **seed, **asked_structure(values))
    prompts = read_prompts(values)
    requests = _conversations(prompts) if values["as_chat"] else prompts
    llm = start_engine(
        ctx,
        asked_arguments(values),
        check=lambda admission: admission.admit(requests, params),
    )
    try:
        with interrupts() as pressed:
            _generate(llm, requests, params, Shown(prompts, values), pressed)
    finally:
        llm.close()
    if pressed:
        tell("stopped")
        ctx.exit(INTERRUPTED)


def _refuse_unseen(values: dict[str, Any]) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] is not None and not values["as_json"]:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} shows in the JSON document only: add --json")
    if values["echo"] and values["as_json"]:
        raise click.UsageError("--echo shows beside the text only: drop --json or --echo")
    if values["show_draft"] and (values["as_json"] or (values["n"] or 1) > 1):
        raise click.UsageError("--show-draft streams one completion: drop --json and --n")


def _conversations(prompts: Sequence[str]) -> list[Any]:
    from paceline.llm.inputs import ChatPrompt

    return [ChatPrompt(messages=[{"role": "user", "content": prompt}]) for prompt in prompts]


def _generate(
    llm: Any, requests: Sequence[Any], params: Any, shown: "Shown", pressed: list[int]
) -> None:
    """All requests run together; the first is shown while it runs."""
    streams = [llm.generate([request], params, stream=True) for request in requests]
    errors = []
    with Progress("prompts", len(streams), unit="prompt", shown=shown.has_bar) as bar:
        for index, stream in enumerate(streams):
            output = shown.show(index, until_stopped(stream, pressed), llm)
            bar.advance()
            errors += [each.error for each in output.outputs if each.finish_reason == "error"]
    if errors:
        raise click.ClickException(str(errors[0]))


class Shown:
    """How the answers are printed."""

    def __init__(self, prompts: Sequence[str], values: dict[str, Any]) -> None:
        self._prompts = prompts
        self._values = values
        self._is_many = (values["n"] or 1) > 1

    @property
    def has_bar(self) -> bool | None:
        """As of core.progress.Progress: none where the text itself moves."""
        return None if self._values["as_json"] else False

    def show(self, index: int, snapshots: Any, llm: Any) -> Any:
        """Print one prompt's answer; returns its last snapshot."""
        values = self._values
        if values["as_json"]:
            *_, output = snapshots
            click.echo(json.dumps(output.as_document() | self._forced()))
            return output
        if len(self._prompts) > 1:
            tell(f"prompt {index}")
        echoed = self._prompts[index] if values["echo"] else ""
        if self._is_many:
            *_, output = snapshots
            for completion in output.outputs:
                tell(f"completion {completion.index}")
                click.echo(echoed + completion.text)
        else:
            click.echo(echoed, nl=False)
            output = self._stream(snapshots, llm)
        tell(rate_line(output.metrics, forced=bool(self._forced())))
        if values["show_draft"]:
            from paceline.cli.draft_stream import draft_line

            tell(draft_line(output.metrics))
        return output

    def _stream(self, snapshots: Any, llm: Any) -> Any:
        if not self._values["show_draft"]:
            return print_stream(snapshots)
        from paceline.cli.draft_stream import print_drafted

        return print_drafted(snapshots, llm.tokenizer, has_colour=has_colour(sys.stdout))

    def _forced(self) -> dict[str, object]:
        forced = self._values["force_accept_len"]
        return {} if forced is None else {"forced_tokens_per_round": forced}
