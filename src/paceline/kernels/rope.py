"""Rotary position embedding, half-rotation form: its definition and its CPU path.

`rope_write_kv` is the operation that runs it.

With halves (a, b) of a row and angle t = position * frequency: a' = a cos t − b sin t,
b' = b cos t + a sin t (Su et al. 2021, arXiv:2104.09864, in the pairing of GPT-NeoX).  Computed in
float32 from float32 tables and rounded once.  transformers rounds cos, sin, both products and the
sum to the model's dtype, so in bfloat16 its result may be up to a few ulps of the pair's length
away, with ours the more exact; in float32 both agree to one ulp.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.custom_op import Run


class Rope(NamedTuple):
    """Where the rows of a step are rotated to."""

    cos_sin: Tensor  # [max_position, rotary_dim]  float32  cosines then sines; rotary_dim <= dim
    positions: Tensor  # [tokens]  int64  each below max_position (trusted: it is on the device);
    # or [axes, tokens], of which each pair of dimensions turns by one
    start: int = 0  # the first dimension that turns: 0, or dim - rotary_dim, the last ones
    axis_columns: tuple[range, ...] = ()  # [axes] the pairs that turn by each, a later axis before
    # those ahead (RopeConfig.axis_columns); (): positions have one axis

    @property
    def flat_columns(self) -> tuple[int, ...]:
        """Start, stop and step of each axis, as an operator takes them; of one axis none."""
        spans = ((span.start, span.stop, span.step) for span in self.axis_columns)
        return tuple(chain.from_iterable(spans)) if self.positions.dim() == 2 else ()


def rope_reference(
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    start: int = 0,
    axis_columns: tuple[range, ...] = (),
) -> Tensor:
    """The definition, for one of q and k, out of place.

    x: [tokens, heads, dim]; cos_sin: [max_position, rotary_dim] float32, the cosine half then the
    sine half; positions: [tokens], or [axes, tokens] with axis_columns as of `Rope`.  Dimensions
    outside [start, start + rotary_dim) pass unchanged.
    """
    stop = start + cos_sin.shape[1]
    turns = cos_sin[positions]  # [tokens, rotary_dim], or of every axis
    if positions.dim() == 2:
        axis_of = torch.zeros(cos_sin.shape[1] // 2, dtype=torch.int64, device=x.device)
        for axis, columns in enumerate(axis_columns):
            axis_of[list(columns)] = axis
        turns = turns.gather(0, axis_of.repeat(2).expand(1, *turns.shape[1:]))[0]
    cos, sin = turns.unsqueeze(1).chunk(2, dim=-1)
    first, second = x[..., start:stop].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((x[..., :start], rotated.to(x.dtype), x[..., stop:]), dim=-1)


def bind_rope(
    q: Tensor,
    k: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    start: int,
    axis_columns: Sequence[range] = (),
) -> list[Run]:
    """What rotates q [tokens, heads, dim] and k [tokens, kv_heads, dim] in place, from `start` on,
    one after another."""
    width = cos_sin.shape[1]
    turns = cos_sin.new_empty(q.shape[0], width)
    cos, sin = turns.view(-1, 1, 2, width // 2).unbind(2)
    # What is looked up where: the whole row, or of each axis its pairs.
    looked_up = [(cos_sin, positions, turns)]
    if positions.dim() == 2:
        pairs, looked = cos_sin.view(-1, 2, width // 2), turns.view(-1, 2, width // 2)
        looked_up = [
            (_pairs_of(pairs, columns), axis, _pairs_of(looked, columns))
            for axis, columns in zip(positions, axis_columns, strict=True)
        ]
    look_up: Any = torch.index_select
    runs: list[Run] = [partial(look_up, table, 0, at, out=found) for table, at, found in looked_up]
    if _is_next_in_row(q, k):
        return [*runs, _bind_rotation(q, q.shape[1] + k.shape[1], cos, sin, start)]
    return runs + [_bind_rotation(x, x.shape[1], cos, sin, start) for x in (q, k)]


def _pairs_of(x: Tensor, columns: range) -> Tensor:
    """Those pairs of x [rows, 2, pairs], as a view."""
    return x[:, :, columns.start : columns.stop : columns.step]


def _bind_rotation(x: Tensor, heads: int, cos: Tensor, sin: Tensor, start: int) -> Run:
    """Rotate `heads` heads from x's first on, in place; cos, sin: [tokens, 1, half] float32."""
    half = cos.shape[2]
    stride_token, stride_head, _ = x.stride()
    strides, begin = (stride_token, stride_head, half, 1), x.storage_offset() + start
    pairs = x.as_strided((x.shape[0], heads, 2, half), strides, begin)
    rotated = cos.new_empty(pairs.shape)
    first, second = pairs.unbind(2)
    new_first, new_second = rotated.unbind(2)
    both_cos = cos.unsqueeze(2)

    def run() -> None:
        torch.mul(pairs, both_cos, out=rotated)
        new_first.addcmul_(second, sin, value=-1.0)
        new_second.addcmul_(first, sin)
        pairs.copy_(rotated)

    return run


def _is_next_in_row(q: Tensor, k: Tensor) -> bool:
    """Whether k's heads follow q's in one fused row, so that both rotate as one."""
    heads, dim = q.shape[1], q.shape[2]
    adjacent = k.data_ptr() == q.data_ptr() + heads * dim * q.element_size()
    return adjacent and q.stride() == k.stride() and q.stride(1) == dim
