"""Other readings of masks and windows than the right one: which keys each shows a row."""

from dataclasses import replace

from paceline.conformance.case import Batch, Case
from paceline.conformance.oracle import (
    VisibleKeys,
    ancestors,
    position,
    visible_keys,
    with_window,
)
from paceline.core.modes import MaskKind


def other_readings(case: Case, batch: Batch) -> dict[str, VisibleKeys]:
    """[name] every wrong reading that means something in such a case."""
    found: dict[str, VisibleKeys] = {
        "first key dropped": lambda *at: visible_keys(*at)[1:],
        "last key dropped": lambda *at: visible_keys(*at)[:-1],
        "window one wider": with_window(lambda window: window and window + 1),
        "window one narrower": with_window(lambda window: window and window - 1),
        "no window": with_window(lambda window: None),
    }
    if case.prefix_only:
        found["the step too"] = _unless_prefix_only
        return found
    found["prefix only"] = _prefix_only
    mask = case.mask(batch)
    if mask is not MaskKind.FULL:
        found["next row visible"] = _with_next_row
        found["full mask"] = _full
    if mask is MaskKind.CAUSAL:
        found["top-left causal"] = _top_left
    else:
        found["a chain"] = _chain
    if mask is MaskKind.TREE:
        found["siblings visible"] = _with_siblings
        found["window by row"] = _window_by_row
    return found


def _unless_prefix_only(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    return visible_keys(replace(case, prefix_only=False), batch, layer, request, row)


def _prefix_only(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    return visible_keys(replace(case, prefix_only=True), batch, layer, request, row)


def _in_window(
    case: Case, batch: Batch, layer: int, request: int, row: int, rows: set[int]
) -> list[int]:
    """The prefix and `rows` of the step, as far as the window of `row` shows them."""
    prefix = batch.prefix_lens[request]
    window = case.layers[layer].window
    edge = -1 if window is None else position(batch, request, row) - window
    in_step = (prefix + j for j in sorted(rows) if position(batch, request, j) > edge)
    return [*range(max(0, edge + 1), prefix), *in_step]


def _rows_seen(case: Case, batch: Batch, layer: int, request: int, row: int) -> set[int]:
    prefix = batch.prefix_lens[request]
    seen = visible_keys(case, batch, layer, request, row)
    return {index - prefix for index in seen if index >= prefix}


def _with_next_row(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    rows = _rows_seen(case, batch, layer, request, row)
    after = {row + 1} if row + 1 < batch.extend_lens[request] else set()
    return _in_window(case, batch, layer, request, row, rows | after)


def _full(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    rows = set(range(batch.extend_lens[request]))
    return _in_window(case, batch, layer, request, row, rows)


def _chain(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    return _in_window(case, batch, layer, request, row, set(range(row + 1)))


def _with_siblings(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    assert batch.parents is not None, "a tree has parents"
    tree = batch.parents[request]
    siblings = {other for other, parent in enumerate(tree) if parent == tree[row]}
    rows = siblings | set(ancestors(tree, row))
    return _in_window(case, batch, layer, request, row, rows)


def _window_by_row(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    """The window counts slots instead of positions."""
    window = case.layers[layer].window
    seen = with_window(lambda window: None)(case, batch, layer, request, row)
    last = batch.prefix_lens[request] + row
    return [index for index in seen if window is None or index > last - window]


def _top_left(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    """Row i sees keys 0..i, whatever the prefix."""
    return [index for index in visible_keys(case, batch, layer, request, row) if index <= row]
