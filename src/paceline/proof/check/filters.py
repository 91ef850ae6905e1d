"""The language of `--filter`: words about a cell's id, `and`, `or`, `not` and parentheses.

    or_part  = and_part { "or" and_part }
    and_part = not_part { "and" not_part }
    not_part = "not" not_part | "(" or_part ")" | word

A word is a part of the id; with `*`, `?` or `[` it is a glob of all of it.  Case does not matter.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from paceline.core.errors import ConfigError, message

Filter = Callable[[str], bool]  # cell id -> wanted
TOKEN = re.compile(r"[()]|[^\s()]+")
JOINS = ("and", "or", "not")


def parse_filter(text: str) -> Filter:
    """What `text` says of a cell id.  Raises ConfigError that points at the place."""
    reader = _Reader.of(text)
    wanted = _any_of(reader)
    if reader.next is not None:
        raise reader.error("and, or, or the end")
    return wanted


@dataclass(slots=True)
class _Reader:
    """The words of an expression and how far they are read."""

    text: str
    words: list[tuple[int, str]]  # column from 0, word
    index: int = 0

    @classmethod
    def of(cls, text: str) -> Self:
        return cls(text, [(found.start(), found.group()) for found in TOKEN.finditer(text)])

    @property
    def next(self) -> str | None:
        """The word to read; None at the end."""
        return self.words[self.index][1] if self.index < len(self.words) else None

    def take(self, word: str) -> bool:
        """Read `word` if it is the next one."""
        found = self.next is not None and self.next.lower() == word
        self.index += found
        return found

    def error(self, expected: str) -> ConfigError:
        """What should stand where the reader is, with a caret under it."""
        column = len(self.text) if self.next is None else self.words[self.index][0]
        got = "the end" if self.next is None else repr(self.next)
        text = message(
            "--filter",
            expected=f"an expression with {expected} at column {column + 1}",
            got=got,
            remedy="join words by and, or, not and parentheses, as in 'verify and not triton'",
        )
        return ConfigError(f"{text}\n  {self.text}\n  {' ' * column}^")


def _any_of(reader: _Reader) -> Filter:
    parts = [_all_of(reader)]
    while reader.take("or"):
        parts.append(_all_of(reader))
    return lambda cell_id: any(part(cell_id) for part in parts)


def _all_of(reader: _Reader) -> Filter:
    parts = [_one(reader)]
    while reader.take("and"):
        parts.append(_one(reader))
    return lambda cell_id: all(part(cell_id) for part in parts)


def _one(reader: _Reader) -> Filter:
    if reader.take("not"):
        inner = _one(reader)
        return lambda cell_id: not inner(cell_id)
    if reader.take("("):
        inner = _any_of(reader)
        if not reader.take(")"):
            raise reader.error("and, or, or )")
        return inner
    word = reader.next
    if word is None or word == ")" or word.lower() in JOINS:
        raise reader.error("a word, not or (")
    reader.index += 1
    return _word(word.lower())


def _word(word: str) -> Filter:
    if re.search(r"[*?\[]", word):
        return lambda cell_id: fnmatchcase(cell_id.lower(), word)
    return lambda cell_id: word in cell_id.lower()
