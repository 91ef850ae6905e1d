"""Feed and Parser: from the text of an answer, as it comes, to pieces of a message.

A format is a generator over a Feed.  It decides by what the text says, never by where it was cut,
so every way to cut a text gives the same message.
"""

from collections.abc import Callable, Generator, Mapping
from enum import Enum
from typing import NamedTuple

from paceline.text.detokenize import begun_length


class Kind(Enum):
    """What a piece adds to a message."""

    CONTENT = "content"
    REASONING = "reasoning"
    NAME = "name"  # a call begins: of its function
    ARGUMENTS = "arguments"  # of the call that began last
    CALLED = "called"  # that call is whole
    BROKEN = "broken"  # that call is none; the text is all that was written of it


class Piece(NamedTuple):
    """A part of a message, in order."""

    kind: Kind
    text: str = ""


# A format's generator: pieces, and None where it needs more text.
Reads = Generator[Piece | None, None, None]
Types = Mapping[str, Mapping[str, str]]  # function -> argument -> its type, as xml_calls.kind_of


class Feed:
    """The text that has come and is not yet told.  Owned by a Parser, cut by one generator."""

    def __init__(self) -> None:
        self.text = ""
        self.is_whole = False  # no more comes

    def take(self, length: int) -> str:
        """Cut so many characters off the beginning."""
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def more(self) -> Generator[None, None, bool]:
        """Wait for more text; False when there is none."""
        if self.is_whole:
            return False
        yield None
        return True

    def skip_blanks(self) -> Generator[None, None, str]:
        """Cut white space off the beginning.  Returns it, once something else has come, or the
        text has ended."""
        blanks = ""
        while True:
            rest = self.text.lstrip()
            blanks += self.take(len(self.text) - len(rest))
            if rest or not (yield from self.more()):
                return blanks

    def begins_with(self, *markers: str) -> Generator[None, None, str]:
        """Which of `markers` the text begins with; "" for none.  Cuts nothing."""
        while True:
            found = [marker for marker in markers if self.text.startswith(marker)]
            if found:
                return max(found, key=len)
            may_come = any(marker.startswith(self.text) for marker in markers)
            if not may_come or not (yield from self.more()):
                return ""

    def until(self, kind: Kind, *markers: str) -> Generator[Piece | None, None, str]:
        """Tell text as `kind` up to the first of `markers`, which is cut with the white space
        before it and returned with that; "" where the text ends without."""
        while True:
            ends = [(at, -len(mark), mark) for mark in markers if (at := self.text.find(mark)) >= 0]
            keep = 0 if ends else begun_length(self.text, markers)
            at, _, marker = min(ends, default=(len(self.text) - keep, 0, ""))
            is_rest = self.is_whole and not marker
            shown = self.text if is_rest else self.text[:at].rstrip()
            if shown:
                yield Piece(kind, self.take(len(shown)))
            if marker:
                return self.take(at - len(shown) + len(marker))
            if not (yield from self.more()):
                return ""


class Parser:
    """Reads one answer.  Feed it text in order, and `finish` at its end."""

    def __init__(self, reads: Callable[[Feed], Reads]) -> None:
        self._feed = Feed()
        self._pieces = reads(self._feed)

    def push(self, text: str) -> list[Piece]:
        """What has become certain."""
        self._feed.text += text
        return self._run()

    def finish(self) -> list[Piece]:
        """The rest, once no more text comes."""
        self._feed.is_whole = True
        return self._run()

    def _run(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._pieces:
            if piece is None:
                break
            pieces.append(piece)
        return pieces


def content_only(feed: Feed, types: Types) -> Reads:
    """All of it is content."""
    yield from feed.until(Kind.CONTENT)
