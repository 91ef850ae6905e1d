"""Blocks in the prefix tree: pages of 4, and a prompt of 24 tokens whose tokens 6 to 14 see one
another."""

import pytest
from test_cache_manager import TOKENS, make_cache, run_request

from paceline.cache.page_keys import NO_KEYS, PageKeys, media_of
from paceline.core.request.blocks import Blocks
from paceline.core.request.input_rows import InputRows

PROMPT = TOKENS[:24]
OTHER_END = [*PROMPT[:13], PROMPT[13] + 1, *PROMPT[14:]]


def with_blocks(*spans: tuple[int, int], ids: list[int] = PROMPT, media: str = "") -> PageKeys:
    """media: of the block's last token."""
    rows = [InputRows(start=13, num_tokens=1, media_hash=media, rows=None)] if media else []
    blocks = Blocks(spans)
    return PageKeys(media=media_of(rows, blocks, ids), blocks=blocks)


@pytest.mark.parametrize(
    ("tokens", "keys", "hit"),
    [
        pytest.param(PROMPT, with_blocks((6, 14)), 20, id="the same"),
        pytest.param(PROMPT, NO_KEYS, 4, id="no block"),
        pytest.param(PROMPT, with_blocks((6, 13)), 4, id="a shorter one"),
        pytest.param(PROMPT, with_blocks((7, 14)), 4, id="one that begins later"),
        pytest.param(PROMPT, with_blocks((6, 14), (18, 20)), 16, id="one more behind it"),
        pytest.param(PROMPT, with_blocks((6, 14), media="m"), 4, id="with media"),
        pytest.param(OTHER_END, with_blocks((6, 14), ids=OTHER_END), 4, id="other ids in its end"),
    ],
)
def test_pages_of_a_block_are_found_by_who_has_the_same_block(tokens, keys, hit):
    cache = make_cache(None)
    run_request(cache, "a", PROMPT, 1, with_blocks((6, 14)))
    assert run_request(cache, "b", tokens, 2, keys) == hit
    assert run_request(cache, "c", tokens, 3, keys) == 20


@pytest.mark.parametrize(
    ("first", "second", "tokens"),
    [
        (with_blocks((6, 14)), with_blocks((6, 14), ids=OTHER_END), OTHER_END),
        (with_blocks((6, 14), media="m"), with_blocks((6, 14), media="n"), PROMPT),
    ],
    ids=["ids", "media"],
)
def test_what_differs_at_a_blocks_end_keeps_its_first_pages_apart(first, second, tokens):
    """Of 6 pages each they have the one before the block in common."""
    cache = make_cache(None)
    run_request(cache, "a", PROMPT, 1, first)
    run_request(cache, "b", tokens, 2, second)
    assert cache.stats().groups[0].cached == 6 + 5


@pytest.mark.parametrize(
    ("spans", "hit"),
    [
        (((6, 24),), 4),  # 20 tokens are found, of which 14 are of the block
        (((6, 21),), 4),
        (((6, 20),), 20),
        (((3, 10), (10, 22)), 0),  # nor does it end within the one before
        (((5, 8), (8, 22)), 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
def test_a_hit_ends_within_no_block(windows, spans, hit):
    cache = make_cache(*windows)
    keys = with_blocks(*spans)
    run_request(cache, "a", PROMPT, 1, keys)
    found = run_request(cache, "b", PROMPT, 2, keys)
    assert found == hit or (
        windows != (None,) and found < hit and keys.blocks.whole(found) == found
    )
