"""state_rows: rows over states where each request is one chunk: decode, chains and trees.

What comes out is defined in extend_states; this writes states and windows in place, or keeps of a
round what its commit needs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.state_inputs import ConvInputs, HeadRows


class Rates(NamedTuple):
    """What heads do with a row's value."""

    decay: Tensor  # [tokens, value_heads]  float32  log; at most 0
    rate: Tensor  # [tokens, value_heads]  float32  beta; without the delta rule times v is written
    skip: Tensor | None  # [value_heads]  times v is added to what is read
    is_delta: bool


def require_rates(rates: Rates) -> None:
    """Raise KernelArgumentError unless kernels can read them."""
    for name, given in (("decay", rates.decay), ("rate", rates.rate)):
        if given.stride(1) != 1 or given.dtype != torch.float32:
            reject(name, expected="float32 with contiguous rows", got=given, remedy="copy it")


class Kept(NamedTuple):
    """What the rows of a round keep, beside their keys and inputs."""

    u: Tensor  # [tokens, value_heads, value_dim]  float32
    summed: Tensor  # [tokens, value_heads]  float32  decay along the branch


def _launch(*arguments: object) -> None:
    require_triton("state_rows", otherwise="choose the torch backend of linear attention")
    from paceline.kernels._triton.state_rows import launch_state_rows

    launch_state_rows(*arguments)  # type: ignore[arg-type]


_STATE_ROWS = define_op(
    "state_rows(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, Tensor? skip, "
    "bool is_delta, Tensor sees, Tensor(a!) state, Tensor slots, Tensor rows, Tensor(b!) window, "
    "Tensor(c!)? u, Tensor(d!)? summed, Tensor(e!) out) -> ()",
    cpu=_launch,
    cuda=_launch,
)


def state_rows(
    heads: HeadRows,
    rates: Rates,
    sees: Tensor,
    state: Tensor,
    given: ConvInputs,
    *,
    kept: Kept | None,
    out: Tensor,
) -> None:
    """What rows read of their states, each behind its ancestors.

    heads: q and k float32, contiguous; sees: [padded_reqs or 1, size, size] bool, of a request's
    `size` rows; state: [num_slots, value_heads, key_dim, value_dim], the part of one layer; given:
    what the rows were made of; kept: of a round: no slot is written; None: `state` and the window
    of `given` are written where requests write, behind their last rows; out: [tokens, value_heads,
    value_dim].  Mutates these alone.  Triton on every device.  Graph-safe: shapes are static.
    Raises KernelArgumentError.
    """
    reqs, size = given.slots.shape[0], sees.shape[-1]
    if sees.shape[0] not in (1, reqs) or sees.stride()[1:] != (size, 1):
        expected = f"[{reqs} or 1, size, size] with contiguous rows"
        reject("sees", expected=expected, got=sees, remedy="pass what plan_rows made")
    if heads.q.shape[0] != reqs * size:
        expected = f"[{reqs * size}, ...], {size} rows of each request"
        reject("q", expected=expected, got=heads.q, remedy="cut a ragged step into chunks")
    if not state.is_contiguous() or state.shape[1:] != (*heads.v.shape[1:2], heads.k.shape[2],
                                                        heads.v.shape[2]):  # fmt: skip
        expected = "contiguous [slots, value_heads, key_dim, value_dim]"
        reject("state", expected=expected, got=state, remedy="pass a layer's part")
    require_rates(rates)
    written = (None, None) if kept is None else kept
    _STATE_ROWS(
        *heads,
        rates.decay,
        rates.rate,
        rates.skip,
        rates.is_delta,
        sees,
        state,
        given.slots,
        given.rows,
        given.window,
        *written,
        out,
    )
