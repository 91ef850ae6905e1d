"""`paceline chat`: a conversation with history; Ctrl-C stops the answer, not the program."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from paceline.cli.console import rate_line, start_engine
from paceline.cli.flags import asked_options, engine_flags, log_to_stderr, sampling_flags
from paceline.cli.verb import Verb
from paceline.core.errors import RequestError

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"
NO_TEMPLATE = (
    "this model has no chat template: it continues your lines as plain text, "
    "and answers like a text, not like an assistant"
)


@click.command(cls=Verb)
@click.option("--system", default=None, help="System message put before the conversation.")
@sampling_flags(max_tokens=None)
@engine_flags
@click.pass_context
def chat(ctx: click.Context, /, **values: Any) -> None:
    """Talk with a model."""
    from paceline.core.sampling_params import SamplingParams

    log_to_stderr()
    params = SamplingParams(
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        top_k=values["top_k"],
        top_p=values["top_p"],
    )
    llm = start_engine(ctx, asked_options(values), check=require_usable)
    try:
        Conversation(llm, params, system=values["system"]).run()
    finally:
        llm.close()


def require_usable(admission: Any) -> None:
    """Raise ModelError where a conversation could not begin; a model without a template can."""
    tokenizer = admission.require_tokenizer()
    if tokenizer.chat_template_fault is not None:
        tokenizer.require_chat_template()


class Conversation:
    """Owns the history of one chat."""

    def __init__(self, llm: Any, params: Any, *, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._reset()

    def run(self) -> None:
        """Read lines until /exit or the end of input."""
        click.echo(HELP, err=True)
        if not self._llm.tokenizer.has_chat_template:
            click.echo(NO_TEMPLATE, err=True)
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
        text, is_aborted, snapshot = "", False, None
        with interrupts() as pressed:
            for snapshot in self._llm.generate([prompt], self._params, stream=True):
                grown = snapshot.outputs[0].text
                click.echo(grown[len(text) :], nl=False)
                text = grown
                if pressed and not is_aborted:
                    is_aborted = self._llm.abort(snapshot.request_id)
        click.echo(" [stopped]" if is_aborted else "")
        if snapshot is not None and snapshot.outputs[0].error is not None:
            click.echo(f"error: {snapshot.outputs[0].error}", err=True)
        elif snapshot is not None and snapshot.metrics is not None:
            click.echo(rate_line(snapshot.metrics), err=True)
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


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list instead of raising inside the engine; the second one raises."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
