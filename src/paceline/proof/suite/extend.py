"""Cases of ragged causal steps: EXTEND, and MIXED, where some rows decode."""

from dataclasses import replace

from paceline.proof.suite.build import Rows, base_case, full, ragged_case, uniform_case, with_frozen
from paceline.proof.suite.case import Case, Inputs, Layer, PageLayout
from paceline.proof.suite.modes import ForwardMode

_BASE = base_case(ForwardMode.EXTEND)
_EDGES: Rows = ((15, 1), (16, 2), (0, 31))  # prefix and total on both sides of a page of 16
_QUICK_LAYOUTS = frozenset({PageLayout.INTERLEAVED, PageLayout.SHARED_PREFIX})


def extend_cases() -> tuple[Case, ...]:
    return (*_lengths(), *_layouts(), *_pages(), *_heads(), *_options(), *_many_queries())


def _lengths() -> tuple[Case, ...]:
    return (
        ragged_case(_BASE, "one", ((37, 21),)),
        ragged_case(_BASE, "zero-prefix-edges", ((0, 15), (0, 16), (0, 17))),
        ragged_case(_BASE, "prefix-exact-page", ((16, 5), (32, 3), (16, 16))),
        ragged_case(_BASE, "ragged-edges", ((15, 1), (16, 2), (17, 17), (0, 31))),
        ragged_case(_BASE, "long-and-short", ((90, 24), (0, 2), (1, 1), (3, 2), (16, 1))),
        *full(
            ragged_case(_BASE, "zero-prefix-exact-page", ((0, 16), (0, 32))),
            ragged_case(_BASE, "total-exact-page", ((7, 9), (20, 12), (0, 16))),
            ragged_case(_BASE, "cross-page", ((10, 12), (30, 5))),
        ),
    )


def _layouts() -> tuple[Case, ...]:
    return tuple(
        replace(
            ragged_case(_BASE, f"layout-{layout.value}", ((33, 5), (35, 14), (47, 2))),
            layout=layout,
            is_quick=layout in _QUICK_LAYOUTS,
        )
        for layout in PageLayout
    )


def _pages() -> tuple[Case, ...]:
    return (
        ragged_case(replace(_BASE, page_size=1), "page1", ((5, 3), (0, 7), (9, 1))),
        ragged_case(replace(_BASE, page_size=64), "page64", ((63, 1), (60, 8), (64, 3))),
        *full(
            ragged_case(
                replace(_BASE, page_size=32), "page32-cross", ((30, 5), (10, 25), (32, 33))
            ),
            ragged_case(replace(_BASE, page_size=128), "page128", ((127, 2), (128, 1), (5, 9))),
            ragged_case(replace(_BASE, page_size=256), "page256", ((250, 7), (256, 2), (3, 4))),
        ),
    )


def _heads() -> tuple[Case, ...]:
    mha, mqa = replace(_BASE, num_kv_heads=4), replace(_BASE, num_kv_heads=1)
    gqa4, gqa7 = replace(_BASE, num_heads=8), replace(_BASE, num_heads=14)
    mqa24 = replace(mqa, num_heads=24)
    return (
        ragged_case(mqa, "mqa-total-exact-page", ((7, 9), (20, 12), (0, 16))),
        ragged_case(gqa7, "gqa7", _EDGES),
        ragged_case(replace(_BASE, head_dim=128, v_head_dim=128), "dim128", _EDGES),
        ragged_case(replace(_BASE, dtype="float32"), "float32", _EDGES),
        *full(
            ragged_case(mha, "mha-ragged-edges", _EDGES),
            ragged_case(mqa24, "mqa24", _EDGES),
            ragged_case(gqa4, "gqa4-cross-page", ((10, 12), (30, 5))),
            ragged_case(replace(_BASE, dtype="float16"), "float16", _EDGES),
        ),
    )


def _options() -> tuple[Case, ...]:
    return (
        ragged_case(replace(_BASE, layers=(Layer(),) * 3), "layers3", _EDGES),
        ragged_case(replace(_BASE, soft_cap=20.0), "soft-cap", _EDGES),
        ragged_case(replace(_BASE, sinks=True), "sinks", _EDGES),
        ragged_case(replace(_BASE, kv_dtype="float8_e4m3fn"), "fp8-cache", _EDGES),
        ragged_case(replace(_BASE, inputs=Inputs.UNEVEN), "uneven", _EDGES),
        *full(ragged_case(replace(_BASE, inputs=Inputs.RANDOM), "random", _EDGES)),
    )


def _many_queries() -> tuple[Case, ...]:
    """Heads of 128, and queries times heads that large tiles are for: prompts of 1 to 150 tokens,
    fresh, and behind prefixes to within a page and to its edge.

    The second is one prompt, beside which nobody can be short.  The third is a graph's alone: few
    heads, padded to so many tokens that tiles have more keys.
    """
    rows: Rows = ((0, 150), (37, 97), (64, 3), (0, 65), (112, 70))
    behind: Rows = ((0, 150), (2100, 33), (64, 3), (0, 65), (1023, 70), (112, 31))
    one = replace(_of_128(_BASE, 64, 16), captured_reqs=1, captured_tokens=390)
    few = ragged_case(_of_128(_BASE, 12, 3), "many-queries-2k", behind)
    return (
        ragged_case(_of_128(_BASE, 64, 16), "many-queries", rows),
        *full(
            uniform_case(one, "many-queries-of-one", (37,), extend=390),
            replace(few, captured_reqs=few.captured_reqs + 1, captured_tokens=2064),
        ),
    )


def _of_128(base: Case, num_heads: int, num_kv_heads: int) -> Case:
    heads = replace(base, num_heads=num_heads, num_kv_heads=num_kv_heads)
    return replace(heads, head_dim=128, v_head_dim=128)


def mixed_cases() -> tuple[Case, ...]:
    """MIXED, short: decode rows first, last and between chunks of prompts."""
    base = base_case(ForwardMode.MIXED)
    rows: Rows = ((15, 1), (0, 17), (16, 1), (20, 5))
    shared = replace(base, layout=PageLayout.SHARED_PREFIX)
    spread = replace(base, layout=PageLayout.INTERLEAVED, num_kv_heads=1)
    return (
        ragged_case(base, "decode-and-chunks", rows),
        ragged_case(replace(base, page_size=1), "page1", ((9, 1), (0, 6), (17, 1))),
        ragged_case(shared, "shared-prefix", ((32, 1), (35, 9), (41, 1))),
        with_frozen(ragged_case(base, "frozen-rows", rows), (), (1,), (0, 2)),
        _many(17, 70),
        _many_queries_and_decodes(replace(base, dtype="float16", page_size=128), "many-queries"),
        *full(
            _many(130, 150, num_kv_heads=5),  # so many that none has splits
            ragged_case(base, "chunks-first", ((16, 16), (0, 9), (31, 1), (40, 1))),
            # Keys of which a short request has splits, beside more rows than have any.
            ragged_case(base, "long-decodes", ((900, 1), (0, 140), (500, 2), (33, 3))),
            ragged_case(spread, "interleaved-mqa", rows),
            ragged_case(replace(base, layers=(Layer(),) * 2, soft_cap=20.0), "soft-cap", rows),
            _many_queries_and_decodes(replace(base, kv_dtype="float8_e4m3fn"), "fp8-cache"),
            ragged_case(replace(base, sinks=True), "sinks", rows),
        ),
    )


def _many(requests: int, longest: int, *, num_kv_heads: int = 1) -> Case:
    """More requests than a block of them, and one that brings more tokens than a tile of rows."""
    heads = max(2, num_kv_heads)
    base = replace(base_case(ForwardMode.MIXED), num_heads=heads, num_kv_heads=num_kv_heads)
    short = [(1 + 7 * row % 23, 1 + row % 3 // 2) for row in range(1, requests)]
    rows = (*short[: requests // 2], (5, longest), *short[requests // 2 :])
    return ragged_case(base, f"many{requests}", rows)


def _many_queries_and_decodes(base: Case, name: str) -> Case:
    """Among prompts as of `_many_queries`, decodes and requests of 2 and 5 tokens, whose 3 heads
    are a small tile."""
    rows: Rows = (
        *((5, 1), (127, 1), (128, 1), (31, 1), (0, 129), (37, 40), (1, 1), (126, 5)),
        *((64, 1), (9, 6), (100, 31), (63, 1), (0, 37), (77, 1), (16, 2), (90, 1)),
    )
    return ragged_case(_of_128(base, 24, 8), name, rows)
