"""What several verbs print and how they reach the engine."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import click


def engine_factory(ctx: click.Context) -> Callable[..., Any]:
    """`LLM`, or what the caller of the command put in its context instead."""
    if ctx.obj is not None:
        factory: Callable[..., Any] = ctx.obj
        return factory
    from paceline.llm.llm import LLM

    default: Callable[..., Any] = LLM
    return default


def start_engine(
    ctx: click.Context,
    asked: Mapping[str, object],
    *,
    check: Callable[[Any], object] = lambda admission: None,
) -> Any:
    """The engine of `engine_factory`.

    check: called with the Admission before weights are read; what it raises keeps them unread.
    """
    factory = engine_factory(ctx)
    if ctx.obj is not None:
        return factory(**asked)
    from paceline.llm.prepare import prepare

    prepared = prepare(asked)
    check(prepared.admission)
    return factory(prepared)


def tell(text: str) -> None:
    """A line on stderr, unless the command was asked to be quiet."""
    logging.getLogger("paceline").info("%s", text)


def print_stream(stream: Any) -> Any:
    """Print each new piece of text; returns the last snapshot."""
    shown, snapshot = 0, None
    for snapshot in stream:
        text = snapshot.outputs[0].text
        click.echo(text[shown:], nl=False)
        shown = len(text)
    click.echo()
    return snapshot


def rate_line(metrics: Any, *, forced: bool = False) -> str:
    """How long it took, for people; forced: acceptance was, so that the text is wrong."""
    rate = "-" if metrics.decode_tok_s is None else f"{metrics.decode_tok_s:.1f}"
    wait = "-" if metrics.ttft_s is None else f"{1e3 * metrics.ttft_s:.0f}"
    per_round = metrics.tokens_per_round
    drafts = "" if per_round is None else f", {per_round:.2f} tokens per round"
    drafts += " (FORCED: the text is wrong)" if forced else ""
    return f"{metrics.output_tokens} tokens, {rate} tokens/s, first after {wait} ms{drafts}"


def has_colour(stream: TextIO) -> bool:
    """Whether colours are wanted: on a terminal, unless NO_COLOR says otherwise (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")
