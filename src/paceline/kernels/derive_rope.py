"""derive_rope: what rope turns a step's tokens by, where positions have several axes.

A request may bring positions of its first tokens, as a prompt with an image does.  Behind these a
token stands at its index + delta on every axis, so decode, rounds and drafts need no host; one that
brings none has 0 of them and delta 0, and stands at its index throughout.

Worked example: two axes; a request that brought 4 positions, delta -1.

    given           [[0, 0], [1, 1], [1, 2], [3, 3]]
    ahead           [4, -1]
    positions       [2, 3, 4, 5]                       the step's
    rope_positions  [[1, 3, 3, 4], [2, 3, 3, 4]]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type
from paceline.kernels.step_view import StepView


class RopeRows(NamedTuple):
    """Where the tokens of requests stand, a row per request; row 0, of padding, holds zeros."""

    given: Tensor  # [rows, max_tokens, axes]  int32  of a request's first tokens
    ahead: Tensor  # [rows, 2]  int32  how many these are; behind them a token is at index + delta

    @classmethod
    def make(cls, rows: int, max_tokens: int, axes: int, device: torch.device) -> "RopeRows":
        """Requests whose tokens stand at their index."""
        given = torch.zeros(rows, max_tokens, axes, dtype=torch.int32, device=device)
        return cls(given, torch.zeros(rows, 2, dtype=torch.int32, device=device))


def derive_rope_reference(rope: RopeRows, view: StepView) -> None:
    """The definition, and the CPU's path; arguments and mutation as `derive_rope`."""
    rows = view.row_ids.index_select(0, view.req_ids)
    num_given, delta = rope.ahead.index_select(0, rows).unbind(1)
    _, max_tokens, axes = rope.given.shape
    places = rows * max_tokens + view.positions.clamp(max=max_tokens - 1)
    given = rope.given.view(-1, axes).index_select(0, places)
    behind = (view.positions + delta).unsqueeze(1)
    is_given = (view.positions < num_given).unsqueeze(1)
    view.rope_positions.T.copy_(torch.where(is_given, given, behind))


def _derive_rope_cuda(*fields: Tensor) -> None:
    from paceline.kernels._triton.derive_rope import launch_derive_rope

    launch_derive_rope(*fields)


_DERIVE_ROPE = define_op(
    "derive_rope(Tensor given, Tensor ahead, Tensor row_ids, Tensor req_ids, Tensor positions, "
    "Tensor(a!) rope_positions) -> ()",
    cpu=None,
    cuda=_derive_rope_cuda,
)


def derive_rope(rope: RopeRows | None, view: StepView) -> None:
    """Fill `view.rope_positions` in place, from its positions; without `rope` they are those.

    view: of a step, a round's rows as a chain or as trees, or a pass of a drafter, once its
    positions are final.  What the rows hold is trusted: it lives on the device.  Graph-safe: the
    grid depends on shapes only.  Raises KernelArgumentError.
    """
    if rope is None:
        return
    shape = (rope.given.shape[2], view.padded_tokens)
    turned = view.rope_positions
    if turned.shape != shape or turned.dtype != torch.int64 or not turned.T.is_contiguous():
        reject(
            "rope_positions",
            expected=f"int64 {list(shape)}, the axes of a token one behind the other",
            got=turned,
            remedy="make the step's buffers with the axes of the model's rope",
        )
    if device_type(turned.device) == "cpu":
        derive_rope_reference(rope, view)
        return
    _DERIVE_ROPE(*rope, view.row_ids, view.req_ids, view.positions, turned.T)
