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

Tokens of a block (core/request/blocks.py) see one another, so the KV of each depends on all of
them.  To the keys a block is media, whose hash is of all that is in it; and no hit ends within one.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.request.blocks import Blocks
from paceline.core.request.input_rows import InputRows


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
    media: tuple[MediaSpan, ...] = ()  # each kind ascending, apart
    blocks: Blocks | None = None  # they are among the media, too

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


def media_of(
    input_rows: Sequence[InputRows], blocks: Blocks | None, token_ids: Sequence[int]
) -> tuple[MediaSpan, ...]:
    """The media that rows in place of embeddings are, and the blocks of the prompt `token_ids`."""
    media = tuple(MediaSpan(each.start, each.stop, each.media_hash) for each in input_rows)
    if blocks is None:
        return media
    brought = PageKeys(media=media)
    return media + tuple(
        MediaSpan(start, stop, _hash_of(token_ids[start:stop], brought.media_within(start, stop)))
        for start, stop in blocks.spans
    )


def _hash_of(token_ids: Sequence[int], media: tuple[str | int, ...]) -> str:
    """Of all that the KV of a block's tokens depends on, within the block."""
    told = repr((*token_ids, *media)).encode()
    return f"block {hashlib.blake2b(told, digest_size=16).hexdigest()}"


NO_KEYS = PageKeys()
