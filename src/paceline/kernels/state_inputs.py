"""state_inputs: what the rows of a step bring to layers of linear attention, behind the
convolution: queries, keys and values of heads, which lie among its channels as a kind has them.

Worked example, two key heads of 2 numbers with a value head of 3 each, as a gated delta net and as
Mamba 2 store them:

    channels            0 1   2 3   4 5 6   7 8   9 10   11 12 13
    key head by head    q0    k0    v0      q1    k1     v1          HeadChannels(0, 2, 4, 7, 7)
    channels            0 1 2   3 4 5   6 7   8 9   10 11   12 13
    all of a kind       v0      v1      k0    k1    q0      q1       HeadChannels(10, 6, 0, 2, 3)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.conv_rows import conv_rows_reference
from paceline.kernels.custom_op import define_op


class HeadChannels(NamedTuple):
    """Where the heads of queries, keys and values are among the channels."""

    first_q: int
    first_k: int
    first_v: int
    step_key: int  # from one key head's queries, or keys, to the next one's
    step_value: int  # likewise of its values, which lie side by side


class HeadRows(NamedTuple):
    """What rows come to, of all heads; outputs of the operation."""

    q: Tensor  # [tokens, key_heads, key_dim]
    k: Tensor  # [tokens, key_heads, key_dim]
    v: Tensor  # [tokens, value_heads, value_dim]


class ConvInputs(NamedTuple):
    """Rows before the convolution, and where its taps are."""

    rows: Tensor  # [tokens, parts, channels // parts]  contiguous within a part of a row
    weight: Tensor  # [channels, width]  the row's own tap last
    bias: Tensor | None  # [channels]
    window: Tensor  # [num_slots, channels, width - 1]  the part of one layer
    slots: Tensor  # [padded_reqs, 3]  int32  read, write, checkpoint; a read slot 0 is zeros
    places: Tensor  # [tokens, width - 1]  int64  see conv_rows


def state_inputs_reference(
    given: ConvInputs, channels: HeadChannels, *, eps: float | None, scale: float, out: HeadRows
) -> None:
    """The definition; arguments and mutation as `state_inputs`, without what is kept."""
    read = given.slots[:, 0].long()
    windows = given.window.index_select(0, read).masked_fill(read.view(-1, 1, 1) == 0, 0.0)
    mixed = conv_rows_reference(
        given.rows.flatten(1), windows, given.places, given.weight, given.bias
    )
    key_heads, key_dim = out.q.shape[1:]
    per_key, value_dim = out.v.shape[1] // key_heads, out.v.shape[2]
    for head in range(key_heads):
        at_key, at_value = head * channels.step_key, channels.first_v + head * channels.step_value
        for into, first in ((out.q, channels.first_q), (out.k, channels.first_k)):
            wide = mixed[:, first + at_key :][:, :key_dim].float()
            if eps is not None:
                wide = wide * (wide.square().sum(1, keepdim=True) + eps).rsqrt()
            into[:, head] = wide * scale if into is out.q else wide
        values = mixed[:, at_value:][:, : per_key * value_dim].unflatten(1, (per_key, value_dim))
        out.v[:, head * per_key : (head + 1) * per_key] = values


def _launch(*arguments: object) -> None:
    require_triton("state_inputs", otherwise="choose the torch backend of linear attention")
    from paceline.kernels._triton.state_inputs import launch_state_inputs

    launch_state_inputs(*arguments)  # type: ignore[arg-type]


_STATE_INPUTS = define_op(
    "state_inputs(Tensor rows, Tensor weight, Tensor? bias, Tensor window, Tensor slots, "
    "Tensor places, int[] channels, float? eps, float scale, Tensor(a!) q, Tensor(b!) k, "
    "Tensor(c!) v, Tensor(d!)? kept) -> ()",
    cpu=_launch,
    cuda=_launch,
)


def state_inputs(
    given: ConvInputs,
    channels: HeadChannels,
    *,
    eps: float | None,
    scale: float,
    out: HeadRows,
    kept: Tensor | None,
) -> None:
    """SiLU of the convolution, as heads; queries and keys of length 1 where there is an `eps`, and
    queries times `scale`.

    No head lies in two parts of the rows.  kept: [tokens, channels] in the dtype of the rows: where
    they are copied to; None: nowhere.  Mutates `out` and `kept`, which are contiguous.  Triton on
    every device.  Graph-safe: shapes are static.  Raises KernelArgumentError.
    """
    rows, size = given.rows, given.weight.shape
    if rows.stride(2) != 1 or rows.shape[1:].numel() != size[0]:
        expected = f"[tokens, parts, ...] of {size[0]} channels with contiguous parts"
        reject("rows", expected=expected, got=rows, remedy="hand on what a layer projects")
    if given.weight.stride() != (size[1], 1):
        reject("weight", expected="contiguous", got=given.weight, remedy="copy it once")
    if given.window.shape[1:] != (size[0], size[1] - 1) or not given.window.is_contiguous():
        expected = f"contiguous [slots, {size[0]}, {size[1] - 1}]"
        reject("window", expected=expected, got=given.window, remedy="pass a layer's part")
    made = (*out, *(() if kept is None else (kept,)))
    if any(not each.is_contiguous() or each.shape[0] != rows.shape[0] for each in made):
        expected = f"[{rows.shape[0]}, ...], contiguous as all of out and kept"
        reject("q", expected=expected, got=out.q, remedy="allocate them for these rows")
    _STATE_INPUTS(*given, list(channels), eps, scale, *out, kept)


def head_rows(
    like: Tensor, tokens: int, key: tuple[int, int], value: tuple[int, int], dtype: torch.dtype
) -> HeadRows:
    """Room for `tokens` rows: queries and keys of `key` heads and numbers in `dtype`, values of
    `value` in that of `like`."""
    return HeadRows(
        q=like.new_empty((tokens, *key), dtype=dtype),
        k=like.new_empty((tokens, *key), dtype=dtype),
        v=like.new_empty((tokens, *value)),
    )
