"""Cases of long contexts: about 600, 1k, 8k and 64k keys, in every mode."""

from dataclasses import replace

from paceline.proof.suite.build import base_case, full, ragged_case, tree_case, uniform_case
from paceline.proof.suite.case import Case
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import VERIFY_TREES, beam, draft_step

_LENGTHS = (("1k", 1023), ("8k", 8192))  # name, prefix


def long_cases() -> tuple[Case, ...]:
    """Lengths x modes, and the options that a long context stresses."""
    return (
        *_beyond_512(),
        *full(
            *(
                case
                for name, prefix in _LENGTHS
                for case in (*_causal(name, prefix), *_speculative(name, prefix))
            ),
            *_longest(),
            *_options(),
            *_windows(),
        ),
    )


def _base(mode: ForwardMode, *windows: int | None) -> Case:
    """Two captured requests."""
    return replace(base_case(mode, *windows), captured_reqs=2)


def _few_heads(mode: ForwardMode) -> Case:
    return replace(_base(mode), num_heads=2, num_kv_heads=1)


def _beyond_512() -> tuple[Case, ...]:
    """Quick: of a tile, a block or a buffer that ends at a power of two."""
    return (
        ragged_case(_few_heads(ForwardMode.EXTEND), "long-600", ((600, 3),)),
        uniform_case(_few_heads(ForwardMode.DECODE), "long-600", (600, 3)),
    )


def _causal(name: str, prefix: int) -> tuple[Case, ...]:
    return (
        ragged_case(_base(ForwardMode.EXTEND), f"long-{name}", ((prefix, 5),)),
        ragged_case(_base(ForwardMode.MIXED), f"long-{name}", ((prefix, 1), (17, 6), (31, 1))),
        uniform_case(_base(ForwardMode.DECODE), f"long-{name}", (prefix, 3)),
    )


def _speculative(name: str, prefix: int) -> tuple[Case, ...]:
    verify, draft = _base(ForwardMode.TARGET_VERIFY), _base(ForwardMode.DRAFT_DECODE)
    prefixes = (prefix, 20)
    return (
        uniform_case(verify, f"long-{name}-chain3", prefixes, extend=3),
        tree_case(verify, f"long-{name}-topk2", prefixes, beam(2, 2)),
        tree_case(draft, f"long-{name}-topk2-step1", prefixes, draft_step(beam(2, 2), 1)),
        uniform_case(_base(ForwardMode.DRAFT_EXTEND_V2), f"long-{name}-fixed3", prefixes, extend=3),
    )


def _longest() -> tuple[Case, ...]:
    """64k keys, of few heads, and of all lengths to 64k in one batch."""
    prefixes = (65535, 20)
    decodes = replace(_few_heads(ForwardMode.DECODE), captured_reqs=8)
    rows = ((0, 1), (65535, 1), (0, 40), (16383, 1), (300, 17), (15, 1), (4095, 3))
    return (
        uniform_case(decodes, "lengths-to-64k", (65535, 1, 15, 16, 300, 4095, 20000)),
        ragged_case(_few_heads(ForwardMode.MIXED), "lengths-to-64k", rows),
        ragged_case(_few_heads(ForwardMode.EXTEND), "long-64k", ((65535, 3),)),
        uniform_case(_few_heads(ForwardMode.DECODE), "long-64k", prefixes),
        tree_case(_few_heads(ForwardMode.TARGET_VERIFY), "long-64k-topk2", prefixes, beam(2, 1)),
    )


def _options() -> tuple[Case, ...]:
    decode = _base(ForwardMode.DECODE)
    many = replace(decode, captured_reqs=8)
    return (
        uniform_case(replace(decode, page_size=1), "long-8k-page1", (8191, 3)),
        uniform_case(replace(decode, page_size=128), "long-8k-page128", (8191, 3)),
        uniform_case(replace(decode, sinks=True), "long-8k-sinks", (8191, 3)),
        uniform_case(replace(decode, soft_cap=20.0), "long-8k-soft-cap", (8191, 3)),
        uniform_case(replace(decode, kv_dtype="float8_e4m3fn"), "long-8k-fp8-cache", (8191, 3)),
        uniform_case(many, "long-8k-and-many-short", (8191, 1, 2, 15, 16, 3, 31)),
        ragged_case(_base(ForwardMode.EXTEND), "long-1k-chunk", ((700, 200), (0, 130))),
    )


def _windows() -> tuple[Case, ...]:
    verify = _base(ForwardMode.TARGET_VERIFY, 128)
    prefixes = (8191, 300)
    return (
        ragged_case(_base(ForwardMode.EXTEND, 1000), "window1000-long-8k", ((8191, 5), (0, 9))),
        uniform_case(_base(ForwardMode.DECODE, 128), "window128-long-8k", prefixes),
        uniform_case(
            _base(ForwardMode.DECODE, None, 1000), "window1000-and-full-long-8k", prefixes
        ),
        uniform_case(verify, "window128-long-8k-chain3", prefixes, extend=3),
        tree_case(verify, "window128-long-8k-topk4", prefixes, VERIFY_TREES["topk4"]),
    )
