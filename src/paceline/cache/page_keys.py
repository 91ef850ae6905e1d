"""PageKeys: what the KV of a request's tokens depends on, beside their ids.

The KV of a page depends on every token up to its end.  The path in the prefix tree says so for ids;
what else it depends on is in the key of the path's root, or of the pages concerned:

    everything    salt, adapter      the root: paths of different ones have no node in common
    some tokens   media              keys of the pages that hold a token of it

Page size 4, prompt [7, 9, 9, 9, 9, 9, 8, 8, 6], whose placeholders 9 stand for media "m":

    page 0    (7, 9, 9, 9, "m", 1, 4)      the ids, then what covers tokens 1 to 3 of the page
    page 1    (9, 9, 8, 8, "m", -3, 2)     "m" began 3 tokens before it

Pages are whole: a hit may end at a page within "m", since what lies before the page's end is in
its key, whatever comes behind it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.input_rows import InputRows


class MediaSpan(NamedTuple):
    """Tokens [start, stop) of a prompt whose ids stand for something else."""

    start: int
    stop: int
    media_hash: str  # of what they stand for: equal ones are the same, token by token


@dataclass(frozen=True, slots=True)
class PageKeys:
    """Made once for a request, and the same however often it is preempted; frozen."""

    salt: Hashable = None  # requests of different salts share no cache pages
    adapter: str | None = None  # by name; it changes the KV of every token
    media: tuple[MediaSpan, ...] = ()  # ascending, apart

    @property
    def root(self) -> Hashable:
        """What the whole path depends on: the key of its root in the prefix tree."""
        return self.salt if self.adapter is None else PageKeys(self.salt, self.adapter)

    def media_within(self, start: int, stop: int) -> tuple[str | int, ...]:
        """What of the media covers tokens [start, stop): hash, first and last place of each, the
        places counted from `start`.  One flat tuple: no container to a collection of garbage."""
        return tuple(
            part
            for span in self.media
            if span.start < stop and start < span.stop
            for part in (span.media_hash, span.start - start, min(span.stop, stop) - start)
        )


def media_of(input_rows: Sequence[InputRows]) -> tuple[MediaSpan, ...]:
    """The media that rows in place of embeddings are."""
    return tuple(MediaSpan(each.start, each.stop, each.media_hash) for each in input_rows)


NO_KEYS = PageKeys()
