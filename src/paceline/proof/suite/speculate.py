"""Cases of speculation: verify and draft steps under chains and trees, and both draft extends."""

from dataclasses import replace

from paceline.proof.suite.build import (
    base_case,
    full,
    live_sizes_case,
    ragged_case,
    tree_case,
    uniform_case,
    with_frozen,
    with_prefixes,
    with_trees,
)
from paceline.proof.suite.case import Case, Inputs, Layer, PageLayout
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import VERIFY_TREES, beam, chain, draft_step, forest, irregular

_VERIFY = base_case(ForwardMode.TARGET_VERIFY)
_DRAFT = base_case(ForwardMode.DRAFT_DECODE)
_EDGES = (13, 16, 31)
_TOPK4 = VERIFY_TREES["topk4"]
_QUICK_TREES = frozenset({"topk2", "topk4", "unbalanced", "deep", "irregular"})


def verify_cases() -> tuple[Case, ...]:
    return (*_verify_chains(), *_verify_trees(), *_verify_options())


def _verify_chains() -> tuple[Case, ...]:
    mha = replace(_VERIFY, num_kv_heads=4)
    spread = replace(_VERIFY, layout=PageLayout.INTERLEAVED)
    return (
        uniform_case(_VERIFY, "chain3", _EDGES, extend=3),
        uniform_case(replace(_VERIFY, page_size=1), "chain4-page1", (3, 9, 1), extend=4),
        *full(
            uniform_case(mha, "chain8-mha", (15, 33), extend=8),
            uniform_case(spread, "chain17", (30, 47), extend=17),
            live_sizes_case(_VERIFY, "chain3-every-live-size", (15, 48, 7, 33), extend=3),
        ),
    )


def _verify_trees() -> tuple[Case, ...]:
    nine = tuple(tree for tree in VERIFY_TREES.values() if len(tree) == 9)
    sizes = live_sizes_case(_VERIFY, "every-live-size", (15, 48, 7, 33), extend=9)
    return (
        *(
            replace(tree_case(_VERIFY, name, _EDGES, tree), is_quick=name in _QUICK_TREES)
            for name, tree in VERIFY_TREES.items()
        ),
        tree_case(_VERIFY, "mixed-shapes", _EDGES, *nine, chain(9)),
        with_frozen(tree_case(_VERIFY, "frozen-rows", _EDGES, *nine), (), (1,), (0,)),
        *full(with_trees(sizes, *nine)),
    )


def _verify_options() -> tuple[Case, ...]:
    fp8 = replace(_VERIFY, kv_dtype="float8_e4m3fn")
    return (
        tree_case(replace(_VERIFY, layers=(Layer(),) * 2), "topk4-layers2", _EDGES, _TOPK4),
        tree_case(replace(_VERIFY, sinks=True), "topk4-sinks", _EDGES, _TOPK4),
        tree_case(fp8, "topk2-fp8-cache", _EDGES, beam(2, 1)),
        tree_case(replace(_VERIFY, captured_reqs=2), "nodes40", (15, 31), irregular(40), chain(40)),
        *full(
            tree_case(
                replace(_VERIFY, num_heads=24, num_kv_heads=1), "topk4-mqa24", _EDGES, _TOPK4
            ),
            tree_case(replace(_VERIFY, num_kv_heads=1), "topk4-mqa", _EDGES, _TOPK4),
            tree_case(replace(_VERIFY, num_kv_heads=4), "topk2-mha", _EDGES, beam(2, 1)),
            tree_case(replace(_VERIFY, num_heads=14), "topk4-gqa7", _EDGES, _TOPK4),
            tree_case(replace(_VERIFY, soft_cap=20.0), "topk2-soft-cap", _EDGES, beam(2, 1)),
            tree_case(replace(_VERIFY, dtype="float32"), "topk4-float32", _EDGES, _TOPK4),
            tree_case(replace(_VERIFY, dtype="float16"), "topk4-float16", _EDGES, _TOPK4),
            tree_case(replace(_VERIFY, inputs=Inputs.UNEVEN), "topk4-uneven", _EDGES, _TOPK4),
            tree_case(_VERIFY, "nodes65", (15, 40), irregular(65), beam(8, 8)),
            uniform_case(replace(_VERIFY, sinks=True), "chain3-sinks", _EDGES, extend=3),
            uniform_case(fp8, "chain3-fp8-cache", _EDGES, extend=3),
        ),
    )


def draft_decode_cases() -> tuple[Case, ...]:
    """DRAFT_DECODE, short: step i computes every drafted node down to depth i + 1."""
    page1 = replace(_DRAFT, page_size=1)
    frozen = replace(_DRAFT, prefix_only=True)
    step3 = draft_step(beam(2, 4), 3)
    return (
        uniform_case(_DRAFT, "chain-step2", _EDGES, extend=3),
        tree_case(_DRAFT, "topk2-step3", _EDGES, step3),
        tree_case(page1, "topk2-step3-page1", (3, 8, 1), step3),
        tree_case(_DRAFT, "topk8-step1", _EDGES, draft_step(beam(8, 2), 1)),
        uniform_case(frozen, "frozen-kv", _EDGES),
        uniform_case(replace(frozen, sinks=True), "frozen-kv-sinks", _EDGES),
        with_prefixes(frozen, "frozen-kv-no-prefix", ((0, 16, 31), (0, 7), (31, 0, 47)), extend=1),
        *full(
            uniform_case(_DRAFT, "chain-step0", _EDGES),
            tree_case(_DRAFT, "topk2-step0", _EDGES, forest(2)),
            tree_case(_DRAFT, "topk2-step1", _EDGES, draft_step(beam(2, 2), 1)),
            tree_case(page1, "topk2-step1-page1", (3, 8, 1), draft_step(beam(2, 2), 1)),
            tree_case(_DRAFT, "topk4-step1", _EDGES, draft_step(beam(4, 2), 1)),
            tree_case(_DRAFT, "topk4-step3", _EDGES, draft_step(beam(4, 4), 3)),
            tree_case(_DRAFT, "deep-step7", _EDGES, draft_step(VERIFY_TREES["deep"], 7)),
            tree_case(_DRAFT, "mixed-shapes", _EDGES, step3, forest(8), irregular(8)),
            uniform_case(frozen, "frozen-kv-rows2", _EDGES, extend=2),
            uniform_case(replace(frozen, page_size=1), "frozen-kv-page1", (1, 7, 12)),
            live_sizes_case(frozen, "frozen-kv-every-live-size", (15, 48, 7, 33)),
        ),
    )


def draft_extend_cases() -> tuple[Case, ...]:
    """DRAFT_EXTEND: accepted tokens and one more; DRAFT_EXTEND_V2: all verified nodes."""
    ragged = base_case(ForwardMode.DRAFT_EXTEND)
    fixed = base_case(ForwardMode.DRAFT_EXTEND_V2)
    return (
        ragged_case(ragged, "accepted-1-to-4", ((13, 4), (16, 1), (31, 3))),
        fixed3(fixed, 2, "real"),
        fixed3(fixed, 2, "scratch"),
        uniform_case(fixed, "fixed9", (15, 16, 40), extend=9),
        *full(
            ragged_case(ragged, "accepted-none", ((13, 1), (16, 1), (31, 1))),
            ragged_case(ragged, "accepted-all", ((13, 4), (16, 4), (31, 4))),
            ragged_case(replace(ragged, page_size=1), "accepted-page1", ((3, 2), (8, 1), (1, 4))),
            *(fixed3(fixed, times, fill) for times in (1, 4) for fill in ("real", "scratch")),
            live_sizes_case(fixed, "fixed3-every-live-size", (15, 48, 7, 33), extend=3),
            uniform_case(replace(fixed, page_size=1), "fixed4-page1", (3, 8, 1), extend=4),
        ),
    )


def fixed3(base: Case, times: int, fill: str) -> Case:
    """Two requests of three tokens in a step captured for `times` as many.

    fill: "real", rows beyond them are requests of prefix 1; "scratch", they are padding.
    """
    captured = 2 * times
    small = (1,) * (captured - 2) if fill == "real" else ()
    lists = tuple(live + small for live in ((15, 30), (16, 7), (9,), (14, 47)))
    case = with_prefixes(base, f"fixed3-capture{times}x-{fill}", lists, extend=3)
    return replace(case, captured_reqs=captured)
