"""Other readings of masks and windows than the right one: which keys each shows a row."""

from collections.abc import Callable
from dataclasses import replace

from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.proof.oracle.methods.softmax import (
    VisibleKeys,
    ancestors,
    block_end,
    edge_of,
    position,
    visible_keys,
    with_window,
)
from paceline.proof.suite.case import Batch, Case

Position = Callable[[Batch, int, int], int]  # of (request, row)


def other_readings(case: Case, batch: Batch) -> dict[str, VisibleKeys]:
    """[name] every wrong reading that means something in such a case."""
    found: dict[str, VisibleKeys] = {
        "first key dropped": lambda *at: visible_keys(*at)[1:],
        "last key dropped": lambda *at: visible_keys(*at)[:-1],
    }
    if batch.encoder_lens is not None:
        found["the step's prefix for the encoder's rows"] = _as_many_as_the_prefix
        return found
    found |= {
        "window one wider": with_window(lambda window: _wider(window, 1)),
        "window one narrower": with_window(lambda window: _wider(window, -1)),
        "no window": with_window(lambda window: None),
    }
    if any(isinstance(each.window, Chunk) for each in case.layers):
        found["a window of a chunk's size"] = with_window(_sliding)
        found["the chunk of the step's first row"] = _chunk_of_row(lambda batch, request: 0)
        found["the chunk of the step's last row"] = _chunk_of_row(
            lambda batch, request: batch.extend_lens[request] - 1
        )
    if case.both_ways:
        found["causal"] = lambda *at: [j for j in visible_keys(*at) if j <= at[-1]]
        found["a window that looks back alone"] = _back_alone
        return found
    if case.prefix_only:
        found["the step too"] = _unless_prefix_only
        found["window counted from the prefix's end"] = _window_of_first_row
        return found
    found["prefix only"] = _prefix_only
    if case.step_only:
        found["the prefix too"] = _unless_step_only
    mask = case.mask(batch)
    if mask is not MaskKind.FULL:
        found["next row visible"] = _with_next_row
        found["full mask"] = _full
    if mask is MaskKind.CAUSAL:
        found["top-left causal"] = _top_left
    else:
        found["a chain"] = _chain
    if mask is MaskKind.BLOCK:
        found["an end counted from the step's first token"] = _end_within_step
        found["a block one token shorter"] = _shorter_block
    if mask is MaskKind.TREE:
        found["siblings visible"] = _with_siblings
        found["window by row"] = _window_by(_row_of, _row_of)
        found["window by row of keys and depth of queries"] = _window_by(position, _row_of)
        found["window by depth of keys and row of queries"] = _window_by(_row_of, position)
    return found


def _wider(window: Lookback | None, by: int) -> Lookback | None:
    return Chunk(window.size + by) if isinstance(window, Chunk) else window and window + by


def _sliding(window: Lookback | None) -> Lookback | None:
    return window.size if isinstance(window, Chunk) else window


def _as_many_as_the_prefix(
    case: Case, batch: Batch, layer: int, request: int, row: int
) -> list[int]:
    return visible_keys(case, batch, layer, request, row)[: batch.prefix_lens[request]]


def _unless_prefix_only(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    return visible_keys(replace(case, prefix_only=False), batch, layer, request, row)


def _prefix_only(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    return visible_keys(replace(case, prefix_only=True), batch, layer, request, row)


def _back_alone(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    first = visible_keys(case, batch, layer, request, row)[0]
    return [*range(first, batch.extend_lens[request])]


def _unless_step_only(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    return visible_keys(replace(case, step_only=False), batch, layer, request, row)


def _in_window(
    case: Case, batch: Batch, layer: int, request: int, row: int, rows: set[int]
) -> list[int]:
    """The prefix, where it counts, and `rows` of the step, as far as the window of `row` shows."""
    prefix = batch.prefix_lens[request]
    first = prefix if case.step_only else 0
    edge = edge_of(case.layers[layer].window, position(batch, request, row))
    in_step = (prefix + j for j in sorted(rows) if position(batch, request, j) > edge)
    return [*range(max(first, edge + 1), prefix), *in_step]


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


def _end_within_step(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    """What is a position is taken for a place in the step; a row still sees itself."""
    prefix = batch.prefix_lens[request]
    end = max(prefix + row + 1, block_end(batch, request, row) - prefix)
    return _in_window(case, batch, layer, request, row, set(range(end - prefix)))


def _shorter_block(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    rows = _rows_seen(case, batch, layer, request, row)
    return _in_window(case, batch, layer, request, row, rows - ({max(rows)} - {row}))


def _with_siblings(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    assert batch.parents is not None, "a tree has parents"
    tree = batch.parents[request]
    siblings = {other for other, parent in enumerate(tree) if parent == tree[row]}
    rows = siblings | set(ancestors(tree, row))
    return _in_window(case, batch, layer, request, row, rows)


def _row_of(batch: Batch, request: int, row: int) -> int:
    """A row's place in the cache, whatever its depth."""
    return batch.prefix_lens[request] + row


def _window_by(of_query: Position, of_key: Position) -> VisibleKeys:
    """The window counts places, of queries or keys or both, instead of positions."""

    def keys(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
        window, prefix = case.layers[layer].window, batch.prefix_lens[request]
        seen = with_window(lambda window: None)(case, batch, layer, request, row)
        if window is None:
            return seen
        edge = edge_of(window, of_query(batch, request, row))
        places = (at if at < prefix else of_key(batch, request, at - prefix) for at in seen)
        return [at for at, place in zip(seen, places, strict=True) if place > edge]

    return keys


def _window_of_first_row(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    return visible_keys(case, batch, layer, request, 0)


def _chunk_of_row(of: Callable[[Batch, int], int]) -> VisibleKeys:
    """All rows of a request see from where one of them does; each still sees itself."""

    def keys(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
        prefix = batch.prefix_lens[request]
        at = position(batch, request, of(batch, request))
        edge = edge_of(case.layers[layer].window, at)
        seen = with_window(lambda window: None)(case, batch, layer, request, row)
        return [key for key in seen if key > edge or key == prefix + row]

    return keys


def _top_left(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    """Row i sees keys 0..i, whatever the prefix."""
    return [index for index in visible_keys(case, batch, layer, request, row) if index <= row]
