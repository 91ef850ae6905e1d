"""Cases small enough for Triton's interpreter: a pairwise choice of the axes over every mode.

Their numbers are float32, or float16 where nothing else is special: the interpreter cuts bfloat16
off where a GPU rounds.
"""

from dataclasses import replace

from paceline.core.model.lookback import Chunk, Lookback
from paceline.proof.suite.build import (
    base_case,
    interpreted,
    ragged_case,
    tree_case,
    uniform_case,
    with_frozen,
)
from paceline.proof.suite.case import Case, Layer, PageLayout
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import beam, chain, draft_step, irregular


def tiny_cases() -> tuple[Case, ...]:
    """At most four requests, and 40 keys of each."""
    return interpreted(*_ragged(), *_uniform(), *_speculative())


def _tiny(mode: ForwardMode, *windows: Lookback | None) -> Case:
    """float32, three requests, pages of 4."""
    base = base_case(mode, *windows)
    return replace(base, dtype="float32", captured_reqs=3, page_size=4)


def _ragged() -> tuple[Case, ...]:
    extend, mixed = _tiny(ForwardMode.EXTEND), _tiny(ForwardMode.MIXED, None, 5)
    windows, chunks = _tiny(ForwardMode.EXTEND, 6), _tiny(ForwardMode.EXTEND, Chunk(6))
    accepted = _tiny(ForwardMode.DRAFT_EXTEND)
    return (
        ragged_case(replace(extend, dtype="float16"), "tiny", ((7, 5), (0, 9))),
        ragged_case(
            replace(extend, page_size=1, layout=PageLayout.INTERLEAVED, soft_cap=20.0),
            "tiny-page1-soft-cap",
            ((5, 3), (2, 4), (3, 2)),
        ),
        ragged_case(
            replace(windows, layout=PageLayout.REVERSED, num_kv_heads=1, sinks=True),
            "tiny-window6-sinks",
            ((11, 6), (0, 7)),
        ),
        ragged_case(chunks, "tiny-chunk6", ((11, 6), (0, 15))),
        ragged_case(
            replace(mixed, layout=PageLayout.SHARED_PREFIX), "tiny-window5", ((9, 1), (8, 5))
        ),
        ragged_case(replace(accepted, page_size=16), "tiny-page16", ((15, 3), (7, 1))),
    )


def _uniform() -> tuple[Case, ...]:
    decode, windows = _tiny(ForwardMode.DECODE), _tiny(ForwardMode.DECODE, 6, None)
    chunks = _tiny(ForwardMode.DECODE, Chunk(6), None)
    fixed = _tiny(ForwardMode.DRAFT_EXTEND_V2)
    return (
        uniform_case(replace(decode, dtype="float16", page_size=16), "tiny-page16", (14, 16)),
        uniform_case(
            replace(decode, page_size=1, num_kv_heads=1, layout=PageLayout.REVERSED, sinks=True),
            "tiny-page1-sinks",
            (5, 9),
        ),
        uniform_case(
            replace(decode, kv_dtype="float8_e4m3fn", num_kv_heads=4), "tiny-fp8-mha", (6, 3)
        ),
        uniform_case(
            replace(windows, layout=PageLayout.INTERLEAVED, soft_cap=20.0),
            "tiny-window6-soft-cap",
            (7, 13),
        ),
        uniform_case(chunks, "tiny-chunk6", (5, 6, 16)),
        uniform_case(
            replace(fixed, layers=(Layer(),) * 2, layout=PageLayout.HIGH_IDS),
            "tiny-fixed3",
            (7, 12),
            extend=3,
        ),
        uniform_case(
            replace(_tiny(ForwardMode.DRAFT_DECODE), prefix_only=True), "tiny-frozen-kv", (7, 12)
        ),
    )


def _speculative() -> tuple[Case, ...]:
    verify, draft = _tiny(ForwardMode.TARGET_VERIFY), _tiny(ForwardMode.DRAFT_DECODE)
    windows = _tiny(ForwardMode.TARGET_VERIFY, 3)
    chunks = _tiny(ForwardMode.TARGET_VERIFY, Chunk(6))
    return (
        uniform_case(replace(verify, dtype="float16"), "tiny-chain3", (6, 11), extend=3),
        tree_case(replace(verify, num_heads=8), "tiny-topk4", (6, 11), beam(4, 2)),
        with_frozen(
            tree_case(replace(verify, page_size=1), "tiny-shapes", (3, 8), irregular(7), chain(7)),
            (),
            (0,),
            (1,),
        ),
        tree_case(replace(windows, page_size=16), "tiny-window3-topk2", (13, 16), beam(2, 2)),
        tree_case(chunks, "tiny-chunk6-topk2", (10, 16), beam(2, 3)),
        tree_case(
            replace(draft, layout=PageLayout.INTERLEAVED, sinks=True),
            "tiny-topk2-step1",
            (7, 10),
            draft_step(beam(2, 2), 1),
        ),
    )
