"""state_step: a row of each request over its state, convolution and all, in one pass over both.

It is `state_inputs` and then `state_rows` for steps of one row a request, which write their slots:
decodes.  What comes out is defined in conv_rows and extend_states.  Rates are given, or made here,
as decay_rates defines them: a launch less between a product and states.  With a gate it is rows
behind that, as `gated_rows_reference` of gated_norm defines them: another one less.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.decay_rates import ENDLESS, RawRates, require_given
from paceline.kernels.gated_norm import Gate
from paceline.kernels.state_inputs import HeadChannels
from paceline.kernels.state_rows import Rates, require_rates


class StepTile(NamedTuple):
    """What one program takes of a state."""

    columns: int  # at most
    warps: int


class StepInputs(NamedTuple):
    """A row of each request before the convolution, all of whose taps are in windows."""

    rows: Tensor  # [reqs, parts, channels // parts]  contiguous within a part of a row
    weight: Tensor  # [channels, width]  the row's own tap last
    bias: Tensor | None  # [channels]
    window: Tensor  # [num_slots, channels, width - 1]  the part of one layer
    slots: Tensor  # [reqs, 3]  int32  read, write, checkpoint; a read slot 0 is zeros


# Where programs are many and where they are few; the fastest on an H200 of 16 to 128 columns and 1
# to 8 warps.
_WIDE, _NARROW = StepTile(64, 2), StepTile(32, 1)
_MANY_PROGRAMS = 256  # wide ones: two for each processor


def step_tile(num: int, value_dim: int) -> StepTile:
    """Of so many states, of all requests and heads."""
    wide = num * -(-value_dim // _WIDE.columns)
    return _WIDE if wide >= _MANY_PROGRAMS else _NARROW


def _launch(*arguments: object) -> None:
    require_triton("state_step", otherwise="choose the torch backend of linear attention")
    from paceline.kernels._triton.state_step import launch_state_step

    launch_state_step(*arguments)  # type: ignore[arg-type]


_STATE_STEP = define_op(
    "state_step(Tensor rows, Tensor weight, Tensor? bias, Tensor(a!) window, Tensor slots, "
    "int[] channels, float? eps, float scale, Tensor decay, Tensor? rate, Tensor? rate_bias, "
    "Tensor? log, float least, float most, Tensor? skip, Tensor? z, Tensor? norm_weight, "
    "bool is_delta, Tensor(b!) state, Tensor(c!) arrived, Tensor(d!) out, Tensor(e!)? squares) "
    "-> ()",
    cpu=_launch,
    cuda=_launch,
)


def state_step(
    given: StepInputs,
    channels: HeadChannels,
    rates: RawRates | tuple[Tensor, Tensor],
    state: Tensor,
    *,
    skip: Tensor | None,
    is_delta: bool,
    eps: float | None,
    scale: float,
    arrived: Tensor,
    out: Tensor,
    gate: Gate | None = None,
) -> Tensor | None:
    """What a row of each request reads of its state, behind the convolution and, if given, a gate.

    channels, eps, scale: as of `state_inputs`; rates: (decay, rate) of `Rates`, as are skip and
    is_delta, or what they are made of, with beta where is_delta; state: [num_slots, value_heads,
    key_dim, value_dim], the part of one layer; arrived: [reqs or more, key_heads] int32 zeros,
    which are zeros again behind it; out: [reqs, value_heads, value_dim].  Mutates `state` and the
    window of `given` where requests write, `arrived` and `out`.  Returns the squares of
    `GatedRows`, a new tensor, where there is a gate.  Triton on every device.  Graph-safe: shapes
    are static.  Raises KernelArgumentError.
    """
    rows, size, (reqs, heads, value_dim) = given.rows, given.weight.shape, out.shape
    if rows.shape[0] != given.slots.shape[0] or rows.stride(2) != 1:
        expected = f"[{given.slots.shape[0]}, parts, ...] with contiguous parts"
        reject("rows", expected=expected, got=rows, remedy="one row of each request, or state_rows")
    if given.weight.stride() != (size[1], 1):
        reject("weight", expected="contiguous", got=given.weight, remedy="copy it once")
    if given.window.shape[1:] != (size[0], size[1] - 1) or not given.window.is_contiguous():
        expected = f"contiguous [slots, {size[0]}, {size[1] - 1}]"
        reject("window", expected=expected, got=given.window, remedy="pass a layer's part")
    if not state.is_contiguous() or (state.shape[1], state.shape[3]) != (heads, value_dim):
        expected = f"contiguous [slots, {heads}, key_dim, {value_dim}]"
        reject("state", expected=expected, got=state, remedy="pass a layer's part")
    if arrived.dtype != torch.int32 or not arrived.is_contiguous() or arrived.shape[0] < reqs:
        expected = f"contiguous int32 [{reqs} or more, key_heads]"
        reject("arrived", expected=expected, got=arrived, remedy="pass what the plan holds")
    if isinstance(rates, RawRates):
        if rates.has_beta != is_delta:
            expected = f"numbers {'with' if is_delta else 'without'} beta"
            reject("rates", expected=expected, got=rates.given, remedy="only delta rules have it")
        require_given(rates.given, heads, has_beta=is_delta)
        numbers: tuple[Any, ...] = (rates.given, None, rates.bias, rates.log, *rates.limits)
    else:
        require_rates(Rates(*rates, skip, is_delta))
        numbers = (*rates, None, None, *ENDLESS)
    squares = None
    if gate is not None:
        _check_gate(gate, out)
        parts = heads * -(-value_dim // step_tile(reqs * heads, value_dim).columns)
        squares = torch.empty((reqs, parts), dtype=torch.float32, device=out.device)
    _STATE_STEP(
        *given,
        list(channels),
        eps,
        scale,
        *numbers,
        skip,
        *(gate or (None, None)),
        is_delta,
        state,
        arrived,
        out,
        squares,
    )
    return squares


def _check_gate(gate: Gate, out: Tensor) -> None:
    size = out.shape[1:].numel()
    if gate.z.shape != (out.shape[0], size) or gate.z.stride(1) != 1:
        expected = f"[{out.shape[0]}, {size}] with a contiguous last dimension"
        reject("z", expected=expected, got=gate.z, remedy="pass gates of the same rows")
    if gate.weight.shape != (size,) or not gate.weight.is_contiguous():
        expected = f"contiguous [{size}]"
        reject("norm_weight", expected=expected, got=gate.weight, remedy="give one of a whole row")
