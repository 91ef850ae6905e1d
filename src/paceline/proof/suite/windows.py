"""Cases of sliding windows, in every mode, and of chunks, with steps over their ends."""

from collections.abc import Callable
from dataclasses import replace

from paceline.core.model.lookback import Chunk
from paceline.proof.suite.build import (
    base_case,
    full,
    ragged_case,
    tree_case,
    uniform_case,
    with_frozen,
)
from paceline.proof.suite.case import Case, PageLayout
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import VERIFY_TREES, beam, draft_step

_LAYOUTS = (PageLayout.CONTIGUOUS, PageLayout.SHUFFLED, PageLayout.INTERLEAVED, PageLayout.REVERSED)
_PAGES = (1, 32, 64, 128)
_EDGES = (2, 16, 31)
_LONG = ((31, 1), (32, 1), (0, 70), (30, 4))  # rows of chunks of 32: two decode, two cross an end


def window_cases() -> tuple[Case, ...]:
    windows = *_extend(), *_mixed(), *_decode(), *_verify(), *_drafts(), *_draft_extends()
    return (*windows, *_chunks())


def _extend() -> tuple[Case, ...]:
    mode = ForwardMode.EXTEND
    four, twelve = base_case(mode, 4), base_case(mode, 12)
    prefixed = ((3, 3), (4, 4), (5, 5), (16, 17))
    return (
        ragged_case(four, "window4-prefix-edges", prefixed),
        ragged_case(twelve, "window12-above-long", ((70, 40), (0, 33), (31, 14))),
        ragged_case(base_case(mode, None, 12, None, 20), "full-and-windows", prefixed),
        *full(
            ragged_case(four, "window4-no-prefix-edges", ((0, 3), (0, 4), (0, 5))),
            ragged_case(twelve, "window12-prefix-within", ((5, 3), (2, 9), (1, 1))),
            ragged_case(base_case(mode, 1), "window1", prefixed),
            ragged_case(base_case(mode, 16), "window16-is-page", ((15, 2), (16, 16), (31, 5))),
            *_spread(twelve, lambda base, name: ragged_case(base, name, _ragged_rows(base))),
        ),
    )


def _ragged_rows(base: Case) -> tuple[tuple[int, int], ...]:
    """Three requests, two of which cross a page."""
    size = base.page_size
    return ((2 * size - 1, 9), (size + 4, size), (3 * size, 1))


def _spread(base: Case, build: Callable[[Case, str], Case]) -> tuple[Case, ...]:
    """The case that `build` makes of a base and a name, in each layout and with each page size."""
    return (
        *(build(replace(base, layout=each), f"window12-{each.value}") for each in _LAYOUTS),
        *(build(replace(base, page_size=size), f"window12-page{size}") for size in _PAGES),
    )


def _mixed() -> tuple[Case, ...]:
    base = base_case(ForwardMode.MIXED, None, 12)
    return (ragged_case(base, "window12-and-full", ((15, 1), (0, 17), (40, 1), (20, 5))),)


def _decode() -> tuple[Case, ...]:
    mode = ForwardMode.DECODE
    twelve = base_case(mode, 12)
    capped = replace(twelve, soft_cap=20.0, sinks=True)
    return (
        uniform_case(twelve, "window12-page-edges", (14, 15, 16)),
        uniform_case(base_case(mode, 33), "window33-pages", (31, 48, 80)),
        uniform_case(base_case(mode, None, 12, None, 20), "full-and-windows", (15, 40, 3)),
        uniform_case(capped, "window12-sinks-soft-cap", (15, 40)),
        *full(
            uniform_case(twelve, "window12-within", (3, 10, 11)),
            uniform_case(twelve, "window12-above", (12, 40, 75)),
            uniform_case(base_case(mode, 1), "window1", (1, 15, 32)),
            *_spread(
                twelve,
                lambda base, name: uniform_case(
                    base, name, (base.page_size, 2 * base.page_size + 5, base.page_size + 13)
                ),
            ),
        ),
    )


def _verify() -> tuple[Case, ...]:
    four = base_case(ForwardMode.TARGET_VERIFY, 4)
    two = base_case(ForwardMode.TARGET_VERIFY, 2)  # less than the depth of a tree
    both = base_case(ForwardMode.TARGET_VERIFY, None, 5)
    page1, page64 = replace(four, page_size=1), replace(four, page_size=64)
    topk4 = VERIFY_TREES["topk4"]
    return (
        uniform_case(four, "window4-chain8-above", (15, 40), extend=8),
        tree_case(two, "window2-topk2-deep", _EDGES, VERIFY_TREES["topk2-deep"]),
        tree_case(four, "window4-topk2", _EDGES, beam(2, 1)),
        tree_case(both, "window5-and-full-topk4", _EDGES, topk4),
        *full(
            uniform_case(four, "window4-chain3", _EDGES, extend=3),
            tree_case(page1, "window4-topk2-page1", _EDGES, beam(2, 1)),
            tree_case(page64, "window4-topk4-page64", (60, 64), topk4),
            tree_case(four, "window4-topk4", _EDGES, topk4),
            tree_case(four, "window4-topk8", _EDGES, VERIFY_TREES["topk8"]),
            tree_case(four, "window4-deep", _EDGES, VERIFY_TREES["deep"]),
        ),
    )


def _drafts() -> tuple[Case, ...]:
    four = base_case(ForwardMode.DRAFT_DECODE, 4)
    page1, frozen = replace(four, page_size=1), replace(four, prefix_only=True)
    step3 = draft_step(beam(2, 4), 3)
    return (
        tree_case(four, "window4-topk2-step3", _EDGES, step3),
        uniform_case(frozen, "window4-frozen-kv", _EDGES),
        uniform_case(frozen, "window4-frozen-kv-rows3", _EDGES, extend=3),
        *full(
            uniform_case(four, "window4-chain-step2", _EDGES, extend=3),
            tree_case(page1, "window4-topk2-step3-page1", _EDGES, step3),
            tree_case(four, "window4-topk4-step1", _EDGES, draft_step(beam(4, 2), 1)),
        ),
    )


def _draft_extends() -> tuple[Case, ...]:
    ragged = base_case(ForwardMode.DRAFT_EXTEND, 12)
    fixed = base_case(ForwardMode.DRAFT_EXTEND_V2, 12)
    both = base_case(ForwardMode.DRAFT_EXTEND_V2, None, 12)
    return (
        ragged_case(ragged, "window12-accepted", ((13, 4), (16, 1), (31, 3))),
        uniform_case(fixed, "window12-fixed3", (10, 15, 31), extend=3),
        *full(
            uniform_case(replace(fixed, page_size=1), "window12-fixed3-page1", (10, 15), extend=3),
            uniform_case(both, "window12-and-full-fixed3", (10, 15, 31), extend=3),
        ),
    )


def _chunks() -> tuple[Case, ...]:
    """Of 12 tokens, which pages of 16 divide at other places, and of 32, whose pages come whole:
    those are for kernels that know no chunks."""
    twelve = Chunk(12)
    extend, decode = base_case(ForwardMode.EXTEND, twelve), base_case(ForwardMode.DECODE, twelve)
    verify = base_case(ForwardMode.TARGET_VERIFY, twelve)
    both = base_case(ForwardMode.TARGET_VERIFY, None, Chunk(32))
    frozen = replace(base_case(ForwardMode.DRAFT_DECODE, twelve), prefix_only=True)
    mixed = base_case(ForwardMode.MIXED, twelve, None, Chunk(32))
    return (
        *_whole_pages(),
        ragged_case(extend, "chunk12-edges", ((11, 3), (12, 4), (0, 31))),
        uniform_case(decode, "chunk12-edges", (11, 12, 40)),
        uniform_case(verify, "chunk12-chain8", (9, 23), extend=8),
        tree_case(verify, "chunk12-deep", (9, 10, 11), VERIFY_TREES["deep"]),
        *full(
            ragged_case(mixed, "chunk12-32-and-full", ((23, 1), (0, 40), (24, 1), (30, 5))),
            ragged_case(
                replace(extend, page_size=64), "chunk12-page64", ((63, 2), (60, 80), (64, 30))
            ),
            tree_case(both, "chunk32-and-full-topk4", (30, 31, 32), VERIFY_TREES["topk4"]),
            uniform_case(frozen, "chunk12-frozen-kv-rows3", (10, 12, 35), extend=3),
            uniform_case(
                replace(base_case(ForwardMode.DECODE, Chunk(1000)), captured_reqs=2),
                "chunk1000-long-8k",
                (8191, 2999),
            ),
            ragged_case(
                replace(base_case(ForwardMode.EXTEND, Chunk(1000)), captured_reqs=2),
                "chunk1000-long-8k",
                ((7998, 5), (0, 1200)),
            ),
        ),
    )


def _whole_pages() -> tuple[Case, ...]:
    """Chunks that begin with a page."""
    both = Chunk(32), None
    decode, frozen = (
        base_case(ForwardMode.DECODE, *both),
        base_case(ForwardMode.DRAFT_DECODE, *both),
    )
    sinks = replace(base_case(ForwardMode.TARGET_VERIFY, *both), sinks=True)
    one_page = replace(base_case(ForwardMode.EXTEND, Chunk(64), Chunk(128)), page_size=64)
    return (
        ragged_case(base_case(ForwardMode.MIXED, *both), "chunk32-edges", _LONG),
        uniform_case(decode, "chunk32-edges", (30, 31, 32, 95)),
        uniform_case(
            base_case(ForwardMode.TARGET_VERIFY, *both), "chunk32-chain8", (27, 57), extend=8
        ),
        tree_case(sinks, "chunk32-deep-sinks", (29, 31, 32), VERIFY_TREES["deep"]),
        *full(
            ragged_case(one_page, "chunk64-128-page64", ((127, 2), (60, 200), (128, 30))),
            uniform_case(
                replace(frozen, prefix_only=True), "chunk32-frozen-kv-rows3", (30, 32, 94), extend=3
            ),
            with_frozen(uniform_case(decode, "chunk32-finished", (31, 70, 32)), (), (0,), (1,)),
            uniform_case(
                replace(base_case(ForwardMode.DECODE, Chunk(1024)), captured_reqs=2),
                "chunk1024-long-8k",
                (8191, 2999),
            ),
        ),
    )
