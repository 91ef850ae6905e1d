"""Cases of prompts with blocks: tokens that see one another in both directions, as a picture's do.

A step holds a block whole.  So blocks begin and end with chunks, at hits, on and beside page edges,
and right behind one another; a decode row of a mixed step has none.
"""

from dataclasses import replace

from paceline.proof.suite.build import Rows, base_case, full, interpreted, ragged_case, with_frozen
from paceline.proof.suite.case import Batch, Case, Inputs, Layer, PageLayout, Spans
from paceline.proof.suite.modes import ForwardMode

_EDGES: Rows = ((15, 3), (16, 9), (0, 31))  # prefix and total on both sides of a page of 16
_MIXED: Rows = ((15, 1), (0, 17), (16, 1), (20, 5))


def block_cases() -> tuple[Case, ...]:
    """Extends and mixed steps, over heads and over latents, with windows and without."""
    extend, mixed = base_case(ForwardMode.EXTEND), base_case(ForwardMode.MIXED)
    windows = base_case(ForwardMode.EXTEND, None, 6)
    latent = replace(extend, method="mla", num_heads=16, num_kv_heads=1, v_in_k=True)
    latent = replace(latent, head_dim=576, v_head_dim=512)
    return (
        blocks_case(extend, "edges", _EDGES),
        blocks_case(replace(extend, layout=PageLayout.INTERLEAVED, sinks=True), "sinks", _EDGES),
        blocks_case(mixed, "decode-and-chunks", _MIXED),
        blocks_case(windows, "window6-and-full", _EDGES),
        blocks_case(latent, "edges", _EDGES),
        *interpreted(*_tiny()),
        *full(
            with_frozen(blocks_case(mixed, "frozen-rows", _MIXED), (), (1,), (0,)),
            blocks_case(
                replace(extend, layout=PageLayout.SHARED_PREFIX),
                "hits",
                ((32, 9), (35, 5), (33, 2)),
            ),
            blocks_case(replace(extend, page_size=1), "page1", ((5, 3), (0, 7), (9, 4))),
            blocks_case(replace(extend, page_size=64), "page64", ((63, 2), (60, 8), (64, 30))),
            blocks_case(replace(extend, num_heads=14), "gqa7", _EDGES),
            blocks_case(replace(extend, dtype="float32"), "float32", _EDGES),
            blocks_case(replace(extend, soft_cap=20.0, layers=(Layer(),) * 2), "soft-cap", _EDGES),
            blocks_case(replace(extend, kv_dtype="float8_e4m3fn"), "fp8-cache", _EDGES),
            blocks_case(replace(extend, inputs=Inputs.UNEVEN), "uneven", _EDGES),
            blocks_case(
                base_case(ForwardMode.EXTEND, 20), "window20", ((33, 24), (0, 31), (47, 5))
            ),
            blocks_case(replace(extend, captured_reqs=2), "long-1k-chunk", ((700, 200), (0, 130))),
        ),
    )


def _tiny() -> tuple[Case, ...]:
    """For Triton's interpreter."""

    def small(*windows: int) -> Case:
        base = base_case(ForwardMode.EXTEND, *windows)
        return replace(base, captured_reqs=3, page_size=4, is_quick=False)

    return (
        blocks_case(replace(small(), dtype="float16"), "tiny", ((7, 5), (0, 9))),
        blocks_case(replace(small(6), dtype="float32"), "tiny-window6", ((11, 6), (0, 9))),
    )


def blocks_case(base: Case, name: str, rows: Rows) -> Case:
    """A ragged case where each request of a chunk has blocks, others with every batch."""
    case = ragged_case(base, f"blocks-{name}", rows)
    batches = tuple(
        replace(batch, blocks=_spans(batch, turn)) for turn, batch in enumerate(case.batches)
    )
    return replace(case, batches=batches)


def _spans(batch: Batch, turn: int) -> tuple[Spans, ...]:
    """[num_reqs] in turn: the whole chunk, its inner tokens, and both its halves."""
    found: list[Spans] = []
    for request, (prefix, kv_len) in enumerate(zip(batch.prefix_lens, batch.kv_lens, strict=True)):
        middle = (prefix + kv_len) // 2
        kinds: tuple[Spans, ...] = (
            ((prefix, kv_len),),
            ((prefix + 1, kv_len - 1),),
            ((prefix, middle), (middle, kv_len)),
        )
        spans = kinds[(request + turn) % len(kinds)]
        found.append(tuple((start, stop) for start, stop in spans if stop - start > 1))
    return tuple(found)
