"""Rows of a step as layers of linear attention see them, derived once for all backends of them.

What a backend of a kind adds is how its inputs become queries, keys, values and decays; which rows
see which, where the taps of a convolution are, and how a ragged step is cut into chunks is the same
for all of them, and in the view already: nothing here computes a length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.linear.shape import CONV, STATE, LinearShape
from paceline.attention.states import Inputs, StateBackend, StateLayer, StateLimits
from paceline.kernels.commit_states import commit_states_reference
from paceline.kernels.conv_rows import conv_rows_reference, next_windows_reference, places_of
from paceline.kernels.extend_states import Chunks, StateRows, extend_states_reference
from paceline.kernels.step_view import GroupView, StepView

LEAST_ROWS, MOST_ROWS = 16, 64  # of a chunk of a ragged step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearBuffers:
    """Everything whose address a graph may hold, at its largest.

    kept_*: what the rows of a round keep until its commit.
    """

    places: Tensor  # [max_tokens, width - 1]  int64  see conv_rows
    tails: Tensor  # [max_reqs, width - 1]  int64  likewise, of the window behind the step
    chunk_reqs: Tensor  # [max_tokens // LEAST_ROWS + max_reqs]  int64  see Chunks
    chunk_rows: Tensor  # [max_tokens + MOST_ROWS * max_reqs]  int64
    chunk_live: Tensor  # [max_tokens + MOST_ROWS * max_reqs]  bool
    chunk_places: Tensor  # [max_tokens]  int64
    arrived: Tensor  # [max_reqs, key_heads]  int32  see state_step; all 0 between kernels
    kept_inputs: Tensor  # [num_layers, max_round_tokens, channels]  of activations
    kept_k: Tensor  # [num_layers, max_round_tokens, key_heads, key_dim]  float32
    kept_u: Tensor  # [num_layers, max_round_tokens, value_heads, value_dim]  float32
    kept_decay: Tensor  # [num_layers, max_round_tokens, value_heads]  float32  summed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearPlan:
    """Views one step may read; nothing assigns to it after `plan_rows`."""

    shape: LinearShape
    slots: Tensor  # [padded_reqs, 3]  int32  read, write, checkpoint
    starts: Tensor  # [padded_reqs + 1]  int32  each request's first row; the last: all rows
    read_slots: Tensor  # [padded_reqs]  int64
    write_slots: Tensor  # [padded_reqs]  int64
    is_new: Tensor  # [padded_reqs]  bool  nothing was read: it starts from zeros
    places: Tensor  # [padded_tokens, width - 1]  int64
    tails: Tensor  # [padded_reqs, width - 1]  int64
    sees: Tensor  # [padded_reqs or 1, size, size]  bool  rows of a chunk
    chunks: Chunks | None  # None: a chunk for each request
    kept: LinearBuffers | None  # of a round; None: states are written as the step runs


def linear_buffers(limits: StateLimits) -> LinearBuffers:
    """For one group of layers, of any kind of linear attention."""
    shape = LinearShape.of(limits.parts)
    reqs, tokens, window = limits.max_reqs, limits.max_tokens, shape.conv_width - 1
    kept = (limits.num_layers, limits.max_round_tokens)

    def made(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=limits.device)

    return LinearBuffers(
        places=made(tokens, window, dtype=torch.int64),
        tails=made(reqs, window, dtype=torch.int64),
        chunk_reqs=made(tokens // LEAST_ROWS + reqs, dtype=torch.int64),
        chunk_rows=made(tokens + MOST_ROWS * reqs, dtype=torch.int64),
        chunk_live=made(tokens + MOST_ROWS * reqs, dtype=torch.bool),
        chunk_places=made(tokens, dtype=torch.int64),
        arrived=made(reqs, shape.key_heads, dtype=torch.int32),
        kept_inputs=made(*kept, shape.channels, dtype=limits.dtype),
        kept_k=made(*kept, shape.key_heads, shape.key_dim, dtype=torch.float32),
        kept_u=made(*kept, shape.value_heads, shape.value_dim, dtype=torch.float32),
        kept_decay=made(*kept, shape.value_heads, dtype=torch.float32),
    )


def plan_rows(
    view: StepView, group: GroupView, buffers: LinearBuffers, *, is_round: bool
) -> LinearPlan:
    """Device-only, static shapes, in place: the same call in eager, capture and replay."""
    tokens, reqs = view.padded_tokens, view.padded_reqs
    rows = torch.arange(tokens, device=view.req_ids.device)
    starts = view.cu_seqlens_q.long()
    places, tails = buffers.places[:tokens], buffers.tails[:reqs]
    _place_taps(view, starts, rows, places)
    if not is_round:
        lens = view.extend_lens.long()
        numbers = torch.arange(reqs, device=rows.device)
        _place_windows(lens, starts[:-1], numbers, tokens, tails)
    is_uniform = tokens == reqs * view.max_extend_len
    one_each = is_round or (is_uniform and view.max_extend_len <= MOST_ROWS)
    size = view.max_extend_len if one_each else _chunk_size(tokens, reqs)
    within = torch.arange(size, device=rows.device)
    sees = (within.unsqueeze(1) >= within).unsqueeze(0)
    if view.tree_mask is not None:
        sees = view.tree_mask.view(reqs, size, size)
    return LinearPlan(
        shape=shape_of(buffers),
        slots=group.page_table,
        starts=view.cu_seqlens_q,
        read_slots=group.read_slots.long(),
        write_slots=group.write_slots.long(),
        is_new=group.read_slots == 0,
        places=places,
        tails=tails,
        sees=sees,
        chunks=None if one_each else _cut(view, starts, rows, within, buffers),
        kept=buffers if is_round else None,
    )


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: StateLayer, plan: LinearPlan
) -> Tensor:
    """[padded_tokens, channels] as `conv_rows_reference`; writes the requests' windows, or keeps
    the inputs of a round.

    inputs: [padded_tokens, channels].
    """
    part = layer.parts[CONV]
    windows = _read(part, plan)
    if plan.kept is None:
        behind = next_windows_reference(inputs, windows, plan.tails)
        part.index_copy_(0, plan.write_slots, behind.to(part.dtype))
    else:
        plan.kept.kept_inputs[layer.index, : inputs.shape[0]].copy_(inputs)
    return conv_rows_reference(inputs, windows, plan.places, weight, bias)


def extend_states(rows: StateRows, layer: StateLayer, plan: LinearPlan) -> Tensor:
    """[padded_tokens, value_heads, value_dim] float32; writes the requests' states, or keeps what
    commit needs of a round."""
    part, tokens = layer.parts[STATE], rows.k.shape[0]
    found = extend_states_reference(rows, _read(part, plan).float(), plan.sees, plan.chunks)
    if plan.kept is None:
        part.index_copy_(0, plan.write_slots, found.states.to(part.dtype))
        return found.out
    assert found.u is not None, "a round is one chunk of each request"
    assert found.decay is not None, "likewise"
    plan.kept.kept_k[layer.index, :tokens].copy_(rows.k)
    plan.kept.kept_u[layer.index, :tokens].copy_(found.u)
    plan.kept.kept_decay[layer.index, :tokens].copy_(found.decay)
    return found.out


def commit_rows(
    view: StepView,
    group: GroupView,
    layer: StateLayer,
    buffers: LinearBuffers,
    *,
    path: Tensor,
    num_kept: Tensor,
) -> None:
    """As of the contract: both parts of one layer, behind the accepted rows of a round."""
    reqs, rows, tokens = view.padded_reqs, view.max_extend_len, view.padded_tokens
    read, written = group.read_slots.long(), group.write_slots.long()
    is_new, at = group.read_slots == 0, layer.index
    conv, state = layer.parts[CONV], layer.parts[STATE]
    behind = commit_states_reference(
        _fresh(state, read, is_new).float(),
        buffers.kept_k[at, :tokens].view(reqs, rows, *buffers.kept_k.shape[2:]),
        buffers.kept_u[at, :tokens].view(reqs, rows, *buffers.kept_u.shape[2:]),
        buffers.kept_decay[at, :tokens].view(reqs, rows, -1),
        path,
        num_kept,
    )
    tails = buffers.tails[:reqs]
    numbers = torch.arange(reqs, device=path.device)
    _place_windows(num_kept.long(), numbers * rows, numbers, tokens, tails, path=path)
    inputs = buffers.kept_inputs[at, :tokens]
    windows = next_windows_reference(inputs, _fresh(conv, read, is_new), tails)
    state.index_copy_(0, written, behind.to(state.dtype))
    conv.index_copy_(0, written, windows.to(conv.dtype))


def shape_of(buffers: LinearBuffers) -> LinearShape:
    """Of the layers that the buffers were made for."""
    return LinearShape(
        key_heads=buffers.kept_k.shape[2],
        value_heads=buffers.kept_u.shape[2],
        key_dim=buffers.kept_k.shape[3],
        value_dim=buffers.kept_u.shape[3],
        conv_width=buffers.places.shape[1] + 1,
    )


def _read(part: Tensor, plan: LinearPlan) -> Tensor:
    return _fresh(part, plan.read_slots, plan.is_new)


def _fresh(part: Tensor, slots: Tensor, is_new: Tensor) -> Tensor:
    """[reqs, *shape] what slots hold; zeros of who starts, whatever slot 0 holds."""
    gone = is_new.view(-1, *(1,) * (part.dim() - 1))
    return part.index_select(0, slots).masked_fill(gone, 0.0)


def _back(window: int, device: torch.device) -> Tensor:
    """[window] int64: tokens from each tap to the row, the furthest first."""
    return torch.arange(window, 0, -1, device=device)


def _place_taps(view: StepView, starts: Tensor, rows: Tensor, into: Tensor) -> None:
    """Of every row, along its branch."""
    reqs, back = view.req_ids, _back(into.shape[1], into.device)
    first = starts.index_select(0, reqs)
    if view.tree_mask is None:
        offsets = (rows - first).unsqueeze(1) - back
        found = rows.unsqueeze(1) - back
    else:
        depths = view.positions - view.prefix_lens.index_select(0, reqs)
        offsets = depths.unsqueeze(1) - back
        of_req = depths.view(view.padded_reqs, -1).index_select(0, reqs)  # [tokens, rows]
        is_there = view.tree_mask.unsqueeze(1) & (of_req.unsqueeze(1) == offsets.unsqueeze(2))
        found = first.unsqueeze(1) + is_there.int().argmax(2)
    width, num = into.shape[1], rows.shape[0]
    into.copy_(places_of(found, offsets, reqs.unsqueeze(1), num_rows=num, window=width))


def _place_windows(
    lens: Tensor,
    first: Tensor,
    reqs: Tensor,
    num_rows: int,
    into: Tensor,
    *,
    path: Tensor | None = None,
) -> None:
    """Of every request, behind its first `lens` rows, or those of `path`.

    lens, first, reqs: [reqs] int64; first: its first row in the step.
    """
    window = into.shape[1]
    offsets = lens.unsqueeze(1) - _back(window, into.device)
    rows = offsets if path is None else path.gather(1, offsets.clamp(min=0))
    found = first.unsqueeze(1) + rows
    into.copy_(places_of(found, offsets, reqs.unsqueeze(1), num_rows=num_rows, window=window))


def _chunk_size(tokens: int, reqs: int) -> int:
    """Rows of a chunk: as many as a request brings, within bounds."""
    each = -(-tokens // reqs)
    return min(MOST_ROWS, max(LEAST_ROWS, 1 << (each - 1).bit_length()))


def _cut(
    view: StepView, starts: Tensor, rows: Tensor, within: Tensor, buffers: LinearBuffers
) -> Chunks:
    """Chunks of one size, as many as there can be."""
    size, tokens, reqs = within.shape[0], view.padded_tokens, view.padded_reqs
    num = tokens // size + reqs
    ends = ((view.extend_lens.long() + (size - 1)) // size).cumsum(0)
    begins = torch.cat((ends.new_zeros(1), ends))  # [reqs + 1] the last of nobody
    numbers = torch.arange(num, device=rows.device)
    owners = buffers.chunk_reqs[:num]
    owners.copy_(torch.searchsorted(ends, numbers, right=True))
    begin = begins.index_select(0, owners)
    first = starts.index_select(0, owners) + (numbers - begin) * size
    found = first.unsqueeze(1) + within
    stops = torch.cat((starts[1:], starts.new_zeros(1))).index_select(0, owners)
    taken = buffers.chunk_rows[: num * size].view(num, size)
    live = buffers.chunk_live[: num * size].view(num, size)
    live.copy_(found < stops.unsqueeze(1))
    taken.copy_(found.clamp(max=tokens - 1))
    offsets = rows - starts.index_select(0, view.req_ids)
    places = buffers.chunk_places[:tokens]
    places.copy_(begins.index_select(0, view.req_ids) * size + offsets)
    return Chunks(reqs=owners, rows=taken, live=live, places=places)


class LinearBackend(StateBackend[LinearBuffers, LinearPlan, Inputs]):
    """A backend that computes over these plans, whatever multiplies."""

    def make_buffers(self, limits: StateLimits) -> LinearBuffers:
        return linear_buffers(limits)

    def plan(
        self, view: StepView, group: GroupView, buffers: LinearBuffers, *, is_round: bool
    ) -> LinearPlan:
        return plan_rows(view, group, buffers, is_round=is_round)
