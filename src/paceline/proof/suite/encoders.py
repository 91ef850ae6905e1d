"""Cases of cross attention: every token sees all rows of its request's encoder, as many as that
made, none included, whatever the request's own length."""

from dataclasses import replace

from paceline.proof.suite.build import (
    base_case,
    full,
    interpreted,
    ragged_case,
    tree_case,
    uniform_case,
    with_frozen,
)
from paceline.proof.suite.case import Case, Layer
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import beam

_EDGES = (13, 16, 31)
_LENS = ((17, 0, 32, 5, 16), (0, 40, 1), (48, 3, 0, 15, 33))  # of each batch's first requests


def encoder_cases() -> tuple[Case, ...]:
    """Decode, extends, mixed steps, chains and trees over an encoder's rows."""
    decode, extend = _cross(ForwardMode.DECODE), _cross(ForwardMode.EXTEND)
    verify, mixed = _cross(ForwardMode.TARGET_VERIFY), _cross(ForwardMode.MIXED)
    tiny = replace(decode, dtype="float16", page_size=4, captured_reqs=3, num_kv_heads=1)
    return (
        _over(uniform_case(decode, "lengths", _EDGES)),
        _over(ragged_case(extend, "lengths", ((15, 1), (16, 2), (0, 31)))),
        _over(tree_case(verify, "topk2", _EDGES, beam(2, 2))),
        *interpreted(*full(_over(uniform_case(tiny, "tiny", (5, 9)), most=20))),
        *full(
            _over(with_frozen(uniform_case(decode, "frozen", (31, 15, 40, 7)), (), (0,), (1, 3))),
            _over(uniform_case(replace(verify, dtype="float32"), "chain3", _EDGES, extend=3)),
            _over(ragged_case(replace(mixed, page_size=1), "page1", ((15, 1), (0, 17), (16, 1)))),
        ),
    )


def _cross(mode: ForwardMode) -> Case:
    return replace(base_case(mode), method="cross", layers=(Layer(),) * 2)


def _over(case: Case, *, most: int = 48) -> Case:
    """`case` with the rows of an encoder for each request."""
    pairs = zip(case.batches, _LENS, strict=True)
    batches = tuple(
        replace(batch, encoder_lens=tuple(min(rows, most) for rows in lens[: batch.num_reqs]))
        for batch, lens in pairs
    )
    return replace(case, batches=batches)
