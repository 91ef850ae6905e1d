"""Softmax attention, in float64, one query token at a time over a list of keys: dense, windowed,
over latents, of which V is a part, and over the rows of an encoder.

It imports nothing of attention, kernels or runner, so that no mistake is shared.  Formulas:
docs/layouts.md, "Masks", "Windows" and "Scores".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.suite.case import Batch, Case

VisibleKeys = Callable[[Case, Batch, int, int, int], list[int]]


def ancestors(parents: tuple[int, ...], row: int) -> list[int]:
    """The rows from `row` up to the one that hangs on the prefix, itself first."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path


def position(batch: Batch, request: int, row: int) -> int:
    """A row's position: prefix + depth in a tree, prefix + row otherwise."""
    prefix = batch.prefix_lens[request]
    if batch.parents is None:
        return prefix + row
    return prefix + len(ancestors(batch.parents[request], row)) - 1


def block_end(batch: Batch, request: int, row: int) -> int:
    """The position behind what a row of a step with blocks sees: its own, or its block's end."""
    assert batch.blocks is not None, "a step without blocks has no ends"
    at = batch.prefix_lens[request] + row
    ends = [stop for start, stop in batch.blocks[request] if start <= at < stop]
    return ends[0] if ends else at + 1


def edge_of(window: Lookback | None, at: int) -> int:
    """The last position that a row at position `at` does not see any more; -1: it sees all."""
    if window is None:
        return -1
    return at - at % window.size - 1 if isinstance(window, Chunk) else at - window


def visible_keys(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
    """Indices of the keys one row sees, ascending: key j of the prefix is j, row j of the step is
    prefix + j.

    Every key of the prefix, and of the step what the mask allows; of these a window of w shows
    those whose position is more than the row's minus w, and a chunk those that as many whole chunks
    lie before as before the row.  Of an encoder's rows every one, and none of the request's own.
    In the step alone, no key of the prefix.  Both ways: every row of the request less than the
    window away.
    """
    prefix = batch.prefix_lens[request]
    if batch.encoder_lens is not None:
        return list(range(batch.encoder_lens[request]))
    if case.prefix_only:
        rows: list[int] = []
    elif case.mask(batch) is MaskKind.TREE:
        assert batch.parents is not None, "a tree has parents"
        rows = sorted(ancestors(batch.parents[request], row))
    elif case.mask(batch) is MaskKind.FULL:
        rows = list(range(batch.extend_lens[request]))
    elif case.mask(batch) is MaskKind.BLOCK:
        rows = list(range(block_end(batch, request, row) - prefix))
    else:
        rows = list(range(row + 1))
    if case.both_ways:
        most = case.layers[layer].window or batch.extend_lens[request]
        assert not isinstance(most, Chunk), "a layer that looks both ways has no chunks"
        return [j for j in range(batch.extend_lens[request]) if abs(j - row) < most]
    first = prefix if case.step_only else 0
    edge = edge_of(case.layers[layer].window, position(batch, request, row))
    in_step = (prefix + j for j in rows if position(batch, request, j) > edge)
    return [*range(max(first, edge + 1), prefix), *in_step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """How a step is read; every other value than the default's is a mistake."""

    keys: VisibleKeys = visible_keys
    is_capped: bool = True
    num_sinks: int = 1  # times that a sink is counted; in a part alone, one time less
    key_factor: float = 1.0  # on every key: a wrong scale of the cache
    value_factor: float = 1.0
    is_striped: bool = False  # head h reads KV head h % kv_heads


TRUE = Meaning()


def attend(
    case: Case, batch: Batch, data: BatchData, layer: int, *, meaning: Meaning = TRUE
) -> Tensor:
    """One layer's output: [num_tokens, heads, v_head_dim] float64, request after request.

    softmax over the visible keys and the sink of cap * tanh(scale * q.k / cap); a sink has no
    value, is neither scaled nor capped, and does not count in a part alone.  0 where a row
    sees nothing.
    """
    return attend_both(case, batch, data, layer, meaning=meaning)[0]


def attend_both(
    case: Case, batch: Batch, data: BatchData, layer: int, *, meaning: Meaning = TRUE
) -> tuple[Tensor, Tensor]:
    """(`attend`, [num_tokens, heads] float64 natural log of the sum of exponentials of the visible
    scores, without sinks; -inf where a row sees nothing)."""
    outs, lses = [], []
    for request, extend in enumerate(batch.extend_lens):
        for row in range(extend):
            seen = meaning.keys(case, batch, layer, request, row)
            out, lse = _attend_row(case, data, layer, request, row, seen, meaning)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _attend_row(
    case: Case,
    data: BatchData,
    layer: int,
    request: int,
    row: int,
    seen: list[int],
    meaning: Meaning,
) -> tuple[Tensor, Tensor]:
    """([heads, v_head_dim], [heads]) of one query token over the keys `seen`."""
    heads, kv_heads = case.num_heads, case.num_kv_heads
    if not seen:
        nothing = torch.full((heads,), -math.inf, dtype=torch.float64)
        return torch.zeros(heads, case.v_head_dim, dtype=torch.float64), nothing
    group = heads // kv_heads
    owned = torch.arange(heads).view(kv_heads, group)  # the heads of each KV head
    if meaning.is_striped:
        owned = owned.view(group, kv_heads).T
    index = torch.tensor(seen)
    keys = data.keys[request][layer].index_select(0, index) * meaning.key_factor
    values = data.values[request][layer].index_select(0, index) * meaning.value_factor
    query = data.queries[request][layer, row]  # [heads, head_dim]
    scores = data.scale * (query[owned] @ keys.permute(1, 2, 0))  # [kv_heads, group, keys]
    if case.soft_cap is not None and meaning.is_capped:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    lse = torch.logsumexp(scores, 2)
    total = lse
    times = meaning.num_sinks - case.is_part
    if data.sinks is not None and times:
        total = torch.logaddexp(lse, data.sinks[layer][owned] + math.log(times))
    found = (scores - total.unsqueeze(2)).exp() @ values.transpose(0, 1)
    place = owned.flatten().argsort()  # of each head among them
    return found.flatten(0, 1)[place], lse.flatten()[place]


def with_window(change: Callable[[Lookback | None], Lookback | None]) -> VisibleKeys:
    """Visible keys under another window than the layer's."""

    def keys(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
        other = replace(case.layers[layer], window=change(case.layers[layer].window))
        layers = (*case.layers[:layer], other, *case.layers[layer + 1 :])
        return visible_keys(replace(case, layers=layers), batch, layer, request, row)

    return keys
