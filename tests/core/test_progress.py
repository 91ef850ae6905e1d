"""Bars on a terminal only, and what Ctrl-C leaves of a run."""

import io
import logging
import sys

import pytest

from paceline.core.progress import Progress, collect, cut_mark


class Terminal(io.StringIO):
    def isatty(self):
        return True


def results(*, until=3):
    yield from range(until)
    if until < 3:
        raise KeyboardInterrupt


def test_a_whole_run_is_not_marked():
    assert collect("runs", results(), total=3, unit="run") == ([0, 1, 2], False)
    assert cut_mark(False) == {}


def test_what_was_there_before_an_interrupt_is_kept():
    assert collect("runs", results(until=2), total=3, unit="run") == ([0, 1], True)
    assert cut_mark(True) == {"interrupted": True}


def test_an_interrupt_before_the_first_result_leaves_nothing():
    with pytest.raises(KeyboardInterrupt):
        collect("runs", results(until=0), total=3, unit="run")


@pytest.mark.parametrize(
    ("stream", "level", "is_shown"),
    [
        (Terminal(), logging.INFO, True),
        (Terminal(), logging.WARNING, True),
        (Terminal(), logging.ERROR, False),
        (io.StringIO(), logging.INFO, False),
    ],
)
def test_bars_are_drawn_on_a_terminal_unless_only_errors_are_wanted(
    monkeypatch, stream, level, is_shown
):
    logger = logging.getLogger("paceline")
    before = logger.level
    monkeypatch.setattr(sys, "stderr", stream)
    logger.setLevel(level)
    try:
        with Progress("runs", 3, unit="run") as bar:
            bar.advance()
    finally:
        logger.setLevel(before)
    assert ("runs" in stream.getvalue()) == is_shown
