"""`paceline chat`: a conversation with history; Ctrl-C stops the answer, not the program."""

import sys
from typing import Any

import click

from paceline.cli.console import rate_line, start_engine, tell
from paceline.cli.flags import asked_arguments, engine_flags, log_flags, log_to_stderr
from paceline.cli.interrupts import interrupts, until_stopped
from paceline.cli.sampling_flags import GREEDY, sampling_flags, sampling_params
from paceline.cli.verb import Verb, examples
from paceline.core.errors import RequestError

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"
NO_TEMPLATE = (
    "this model has no chat template: it continues your lines as plain text, "
    "and answers like a text, not like an assistant"
)


@click.command(
    cls=Verb,
    epilog=examples(
        "paceline chat",
        "paceline chat --model Qwen/Qwen3-8B --system 'Answer in one line.' --temperature 0.7",
    ),
)
@click.option("--system", default=None, help="System message put before the conversation.")
@sampling_flags(
    without=("n", "logprobs", "prompt_logprobs"),
    max_tokens=(None, "an answer ends by itself"),
    temperature=GREEDY,
)
@log_flags
@engine_flags
@click.pass_context
def chat(ctx: click.Context, /, **values: Any) -> None:
    """Talk with a model."""
    log_to_stderr(values)
    params = sampling_params(values)
    llm = start_engine(ctx, asked_arguments(values), check=require_usable)
    try:
        ChatSession(llm, params, system=values["system"]).run()
    finally:
        llm.close()


def require_usable(admission: Any) -> None:
    """Raise ModelError where a conversation could not begin; a model without a template can."""
    tokenizer = admission.require_tokenizer()
    if tokenizer.chat_template_fault is not None:
        tokenizer.require_chat_template()


class ChatSession:
    """Owns the history of one chat."""

    def __init__(self, llm: Any, params: Any, *, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._reset()

    def run(self) -> None:
        """Read lines until /exit or the end of input."""
        tell(HELP)
        if not self._llm.tokenizer.has_chat_template:
            tell(NO_TEMPLATE)
        while (line := read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self._reset()
                click.echo("forgotten", err=True)
            elif line.startswith("/"):
                click.echo(f"unknown command {line}; {HELP}", err=True)
            elif line:
                self._turn(line)

    def _reset(self) -> None:
        self._messages = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def _turn(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        try:
            answer = self._answer(self._prompt())
        except RequestError as error:
            self._messages.pop()
            click.echo(f"{type(error).__name__}: {error}\n{HELP}", err=True)
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _prompt(self) -> str | list[int]:
        if self._llm.tokenizer.has_chat_template:
            prompt: str | list[int] = self._llm.tokenizer.apply_chat_template(self._messages)
            return prompt
        return "\n".join(entry["content"] for entry in self._messages) + "\n"

    def _answer(self, prompt: str | list[int]) -> str:
        text, snapshot = "", None
        with interrupts() as pressed:
            stream = self._llm.generate([prompt], self._params, stream=True)
            for snapshot in until_stopped(stream, pressed):
                grown = snapshot.outputs[0].text
                click.echo(grown[len(text) :], nl=False)
                text = grown
        click.echo(" [stopped]" if pressed else "")
        if snapshot is not None and snapshot.outputs[0].error is not None:
            click.echo(f"error: {snapshot.outputs[0].error}", err=True)
        elif snapshot is not None and snapshot.metrics is not None:
            tell(rate_line(snapshot.metrics))
        return text


def read_line() -> str | None:
    """One line of input, stripped; None at its end.  Ctrl-C at the prompt starts a new line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            click.echo(f"\n{HELP}", err=True)
        except EOFError:
            return None
