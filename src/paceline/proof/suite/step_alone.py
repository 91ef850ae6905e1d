"""Cases of steps alone: of Part.STEP, from the arguments, under each mask; and of layers that look
both ways, which have no cache at all.

No slot of the former's caches holds a number, and none may be written.
"""

from dataclasses import replace

from paceline.proof.suite.blocks import blocks_case
from paceline.proof.suite.build import Rows, base_case, full, interpreted, ragged_case, tree_case
from paceline.proof.suite.case import Batch, Case
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.trees import beam, irregular

_ROWS: Rows = ((15, 3), (16, 70), (0, 31))  # the second of two tiles of queries


def step_cases() -> tuple[Case, ...]:
    """Extends, blocks and trees, with windows and without."""
    extend, windows = _alone(ForwardMode.EXTEND), _alone(ForwardMode.EXTEND, 6, None)
    verify, branches = _alone(ForwardMode.TARGET_VERIFY), _alone(ForwardMode.TARGET_VERIFY, 3)
    tiny = replace(extend, dtype="float16", captured_reqs=3, page_size=4)
    tree = replace(branches, dtype="float32", captured_reqs=3, page_size=4, soft_cap=20.0)
    return (
        ragged_case(replace(extend, sinks=True), "step-alone", _ROWS),
        *full(ragged_case(replace(windows, num_heads=14), "step-alone-window6", _ROWS)),
        blocks_case(windows, "step-alone", _ROWS),
        tree_case(replace(verify, head_dim=128, v_head_dim=64), "step-alone", (13, 1), beam(4, 2)),
        *interpreted(
            *full(
                blocks_case(tiny, "step-alone-tiny", ((7, 5), (0, 9))),
                tree_case(tree, "step-alone-tiny", (13, 16), irregular(7), beam(2, 3)),
            )
        ),
    )


def both_ways_cases() -> tuple[Case, ...]:
    """Texts that fill a padded step, then fewer, then longer ones; windows on both sides.

    Worked example, local_attention of 12, a width with its ends: as a layer's window, 7; a radius
    of 6 with its ends likewise; a radius of 7 without them, 7 as it is.
    """
    base = replace(base_case(ForwardMode.EXTEND, None, 7, 1), method="embed", both_ways=True)
    wide = replace(base_case(ForwardMode.EXTEND, 65), method="embed", both_ways=True)
    tiny = replace(base_case(ForwardMode.EXTEND, None, 5), method="embed", both_ways=True)
    tiny = replace(tiny, dtype="float16", is_quick=False)
    wide = replace(wide, num_heads=14, head_dim=128, v_head_dim=64)
    return (
        _texts(base, "texts", ((3, 70, 31), (17, 5), (80, 20, 1))),
        *full(_texts(wide, "window65", ((150, 1), (64, 66), (160,)))),
        *interpreted(_texts(tiny, "tiny", ((9, 5, 1), (4, 2), (13, 1)))),
    )


def _texts(base: Case, name: str, lens: tuple[tuple[int, ...], ...]) -> Case:
    """Whole in every step; the last two leave tokens over, and a row to hold them."""
    batches = tuple(Batch((0,) * len(each), each) for each in lens)
    reqs = max(batch.num_reqs for batch in batches) + 1
    tokens = max(batch.num_tokens for batch in batches)
    return replace(base, name=name, batches=batches, captured_reqs=reqs, captured_tokens=tokens)


def _alone(mode: ForwardMode, *windows: int | None) -> Case:
    return replace(base_case(mode, *windows), step_only=True)
