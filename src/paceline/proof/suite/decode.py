"""Cases of DECODE: one token per request."""

from dataclasses import replace

from paceline.proof.suite.build import (
    base_case,
    full,
    live_sizes_case,
    uniform_case,
    with_frozen,
    with_prefixes,
)
from paceline.proof.suite.case import Case, Inputs, Layer, PageLayout
from paceline.proof.suite.modes import ForwardMode

_BASE = base_case(ForwardMode.DECODE)
_EDGES = (14, 15, 16)  # totals below, at and above a page of 16
_QUICK_LAYOUTS = frozenset({PageLayout.CONTIGUOUS, PageLayout.REVERSED, PageLayout.HIGH_IDS})


def decode_cases() -> tuple[Case, ...]:
    return (*_lengths(), *_layouts(), *_crowds(), *_pages(), *_heads(), *_options())


def _lengths() -> tuple[Case, ...]:
    two, eight = replace(_BASE, captured_reqs=2), replace(_BASE, captured_reqs=8)
    return (
        _steady(),
        uniform_case(_BASE, "page-edges", _EDGES),
        uniform_case(two, "one", (37,)),
        uniform_case(eight, "long-and-short", (110, 1, 2, 3, 1)),
        _many(33),
        live_sizes_case(_BASE, "every-live-size", (15, 33, 7, 48, 16, 1, 90, 31)),
        with_frozen(uniform_case(_BASE, "frozen-rows", (31, 15, 40, 7)), (), (0,), (1, 3)),
        *full(
            with_frozen(live_sizes_case(_BASE, "frozen-alone", (30, 40, 15)), (), (0,), (1,)),
            uniform_case(_BASE, "full-bucket", (31, 1, 47, 16)),
            uniform_case(eight, "quarter-bucket", (50, 17)),
            _many(130),
        ),
    )


def _many(requests: int) -> Case:
    """More requests than a block or a warp of them."""
    base = replace(_BASE, captured_reqs=requests, num_heads=2, num_kv_heads=1)
    return uniform_case(base, f"many{requests}", [1 + 7 * row % 23 for row in range(requests)])


def _steady() -> Case:
    """The same requests in the same rows, a token longer each time: a layout that does not change.

    Then others of the same lengths in other rows, then one has ended, and all are a page longer.
    """
    steady = ((15, 30, 7), (16, 31, 8), (17, 32, 9), (18, 33, 10))
    case = with_prefixes(_BASE, "steady", (*steady, (10, 18, 33), (9, 20), (33, 49, 25)), extend=1)
    batches = [replace(each, goes_on=turn in (1, 2, 3)) for turn, each in enumerate(case.batches)]
    return replace(case, batches=tuple(batches))


def _layouts() -> tuple[Case, ...]:
    return tuple(
        replace(
            uniform_case(_BASE, f"layout-{layout.value}", (37, 50, 33)),
            layout=layout,
            is_quick=layout in _QUICK_LAYOUTS,
        )
        for layout in PageLayout
    )


def _crowds() -> tuple[Case, ...]:
    """Prefixes that are read once for many requests: joined and left, cut short, by too few.

    What all requests of a batch share is as long as its shortest prefix.
    """
    base = replace(
        _BASE,
        layout=PageLayout.SHARED_PREFIX,
        num_heads=16,
        num_kv_heads=8,
        captured_reqs=16,
        is_quick=False,
    )
    many = (530, 600, 513, 517, 700, 529, 544, 560, 640)
    turns = (many, (*many, 2000, 1111, 575), many[:5], (*many, 100), (512,) * 8, (527,) * 8)
    options = replace(base, sinks=True, soft_cap=20.0, layers=(Layer(),) * 2)
    return (
        with_prefixes(base, "crowd", turns, extend=1),
        *full(
            with_prefixes(replace(base, num_heads=24), "crowd-gqa3", turns[:3], extend=1),
            with_prefixes(replace(base, page_size=1), "crowd-page1", turns[:3], extend=1),
            with_prefixes(options, "crowd-sinks-soft-cap", turns[:3], extend=1),
            with_prefixes(
                replace(base, layers=(Layer(),) * 2, kv_dtype="float8_e4m3fn"),
                "crowd-fp8-cache",
                turns[:3],
                extend=1,
            ),
        ),
    )


def _pages() -> tuple[Case, ...]:
    return (
        uniform_case(replace(_BASE, page_size=1), "page1", (5, 8, 1)),
        uniform_case(replace(_BASE, page_size=32), "page32", (30, 31, 32)),
        uniform_case(replace(_BASE, page_size=128), "page128", (126, 127, 5)),
        *full(
            uniform_case(replace(_BASE, page_size=64), "page64", (62, 63, 64)),
            uniform_case(replace(_BASE, page_size=256), "page256", (255, 256, 9)),
        ),
    )


def _heads() -> tuple[Case, ...]:
    mqa_two = replace(_BASE, num_kv_heads=1, captured_reqs=2)
    return (
        uniform_case(replace(_BASE, num_heads=8), "gqa4-page-edges", _EDGES),
        uniform_case(replace(_BASE, num_heads=8, num_kv_heads=1), "mqa8", _EDGES),
        uniform_case(replace(_BASE, num_heads=24, num_kv_heads=1), "mqa24", _EDGES),
        uniform_case(replace(_BASE, dtype="float16"), "float16", _EDGES),
        *full(
            uniform_case(replace(_BASE, num_kv_heads=4), "mha-page-edges", _EDGES),
            uniform_case(replace(_BASE, num_heads=14), "gqa7", _EDGES),
            uniform_case(mqa_two, "mqa-one", (21,)),
            uniform_case(replace(_BASE, head_dim=128, v_head_dim=128), "dim128", _EDGES),
            uniform_case(replace(_BASE, dtype="float32"), "float32", _EDGES),
        ),
    )


def _options() -> tuple[Case, ...]:
    prefixes = (37, 15, 64)
    alone = replace(_BASE, layout=PageLayout.CONTIGUOUS, captured_reqs=1)
    two = replace(_BASE, layers=(Layer(),) * 2)  # each with sinks and scales of its own
    both = replace(two, sinks=True, soft_cap=20.0, layout=PageLayout.INTERLEAVED)
    return (
        uniform_case(replace(_BASE, layers=(Layer(),) * 3), "layers3", prefixes),
        uniform_case(alone, "alone-contiguous", (37,)),
        uniform_case(both, "sinks-soft-cap", prefixes),
        uniform_case(replace(two, kv_dtype="float8_e4m3fn"), "fp8-cache", prefixes),
        uniform_case(replace(_BASE, inputs=Inputs.RANDOM), "random", prefixes),
        uniform_case(replace(_BASE, inputs=Inputs.UNEVEN), "uneven", prefixes),
        *full(
            uniform_case(replace(_BASE, soft_cap=20.0), "soft-cap", prefixes),
            uniform_case(replace(_BASE, sinks=True), "sinks", prefixes),
        ),
    )
