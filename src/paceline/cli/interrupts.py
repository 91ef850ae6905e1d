"""Ctrl-C: what there is by then is shown, and the exit code is 130."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from paceline.core.progress import INTERRUPTED


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


def until_stopped(stream: Any, pressed: list[int]) -> Iterator[Any]:
    """The snapshots of an engine's stream; once Ctrl-C was pressed its requests end, and their last
    snapshots come.
    """
    if pressed:
        stream.stop()
    is_stopped = bool(pressed)
    for snapshot in stream:
        yield snapshot
        if pressed and not is_stopped:
            is_stopped = True
            stream.stop()


def end_of_run(ctx: click.Context, *, is_cut: bool, code: int = 0) -> None:
    """Leave with `code`, or as interrupted."""
    if is_cut:
        click.echo("stopped", err=True)
    ctx.exit(INTERRUPTED if is_cut else code)
