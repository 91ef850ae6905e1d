"""Cases of Part.STEP: the step's own rows alone, from the arguments, under each mask.

No slot of their caches holds a number, and none may be written.
"""

from dataclasses import replace

from paceline.proof.suite.blocks import blocks_case
from paceline.proof.suite.build import Rows, base_case, full, interpreted, ragged_case, tree_case
from paceline.proof.suite.case import Case
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


def _alone(mode: ForwardMode, *windows: int | None) -> Case:
    return replace(base_case(mode, *windows), step_only=True)
