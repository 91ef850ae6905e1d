"""Progress: a bar on stderr, drawn by tqdm, and what Ctrl-C leaves of a run."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

INTERRUPTED = 130  # exit code of a program that Ctrl-C ended: 128 and the number of SIGINT
T = TypeVar("T")


_watcher: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watch: Callable[[str, int, int], None]) -> Iterator[None]:
    """Within the block `watch` hears of every Progress of its thread, shown or not: (label, done,
    total), when it begins and when it advances."""
    token = _watcher.set(watch)
    try:
        yield
    finally:
        _watcher.reset(token)


class Progress:
    """Counts towards a total.

    shown: None means on a terminal only, and not where only errors are logged.  Without the tqdm
    package nothing is drawn.  A unit of "B" is shown in decimal multiples.
    """

    def __init__(self, label: str, total: int, *, unit: str, shown: bool | None = None) -> None:
        self._label, self._total, self._done = label, total, 0
        self._watch = _watcher.get()
        self._bar: Any = None
        if _is_wanted() if shown is None else shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            is_bytes = unit == "B"
            unit = unit if is_bytes else f" {unit}"
            self._bar = tqdm(
                total=total, desc=label, unit=unit, unit_scale=is_bytes, file=sys.stderr
            )

    def __enter__(self) -> "Progress":
        self.advance(0)
        return self

    def advance(self, count: int = 1) -> None:
        self._done += count
        if self._watch is not None:
            self._watch(self._label, self._done, self._total)
        if self._bar is not None:
            self._bar.update(count)

    def note(self, text: str) -> None:
        """Show a few words behind the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def collect(label: str, results: Iterable[T], *, total: int, unit: str) -> tuple[list[T], bool]:
    """(the results, shown as they come; whether Ctrl-C ended them early).

    Raises KeyboardInterrupt when it came before the first.
    """
    found: list[T] = []
    try:
        with Progress(label, total, unit=unit) as bar:
            for result in results:
                found.append(result)
                bar.advance()
    except KeyboardInterrupt:
        if not found:
            raise
        return found, True
    return found, False


def cut_mark(is_cut: bool) -> dict[str, object]:
    """What the document of a run says that Ctrl-C ended early."""
    return {"interrupted": True} if is_cut else {}


def _is_wanted() -> bool:
    level = logging.getLogger("paceline").getEffectiveLevel()
    return sys.stderr.isatty() and level <= logging.WARNING
