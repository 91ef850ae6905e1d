"""Reasoning between <think> and </think>, as DeepSeek-R1 and Qwen3 write it before their answer."""

from paceline.server.tools.feed import Feed, Kind, Reads

OPEN, CLOSE = "<think>", "</think>"


def think(feed: Feed, *, has_begun: bool) -> Reads:
    """has_begun: the prompt ends inside of it.  White space around it belongs to it."""
    blanks = yield from feed.skip_blanks()
    if (yield from feed.begins_with(OPEN)):
        feed.take(len(OPEN))
    elif not has_begun:
        feed.text = blanks + feed.text
        return
    yield from feed.skip_blanks()
    if (yield from feed.until(Kind.REASONING, CLOSE)):
        yield from feed.skip_blanks()
