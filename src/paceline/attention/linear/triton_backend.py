"""What the Triton backends of linear attention share: all but how inputs become rows.

Buffers are torch's, and so is the plan, but of decodes of a few requests (linear/rows.py): a layer
of these is one launch, `state_step`, which makes rates, too.  All else is two behind the rates:
`state_inputs` convolves, and one kernel reads and writes states and windows, or keeps what a
round's commit needs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.capability import triton_reasons
from paceline.attention.contract import GraphSupport
from paceline.attention.linear.inputs import HeadRates, made_rates
from paceline.attention.linear.rows import (
    LinearBuffers,
    LinearPlan,
    linear_buffers,
    plan_rows,
    shape_of,
)
from paceline.attention.linear.shape import CONV, STATE, LinearShape
from paceline.attention.states import (
    Inputs,
    StateBackend,
    StateCapabilities,
    StateConfig,
    StateLayer,
    StateLimits,
)
from paceline.core.modes import MaskKind
from paceline.kernels.commit_states import commit_states
from paceline.kernels.gated_norm import Gate
from paceline.kernels.state_chunks import state_chunks
from paceline.kernels.state_inputs import ConvInputs, HeadChannels, head_rows, state_inputs
from paceline.kernels.state_rows import Kept, Rates, state_rows
from paceline.kernels.state_step import StepInputs, state_step
from paceline.kernels.step_view import GroupView, StepView

MOST_KEY_DIM = 256  # rows of a state that a program holds in registers
MOST_KEY_BYTES = 512  # of a key: chunks of 64 rows of larger ones take 101 to 168 KiB of shared
# memory, where many GPUs have 99 (benchmarks/state_chunks_memory.py)
MOST_STEP_VALUES = 131_071  # of all requests: of more, states alone fill the GPU, and two kernels,
# of which one convolves once, are faster (decision 111)
MOST_ROUND_ROWS = 64  # of a request, whose products with one another it holds too


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePlan:
    """Of a step of one row each that writes its slots: its taps are all in windows, and it sees
    itself, so nothing is derived."""

    shape: LinearShape
    slots: Tensor  # [padded_reqs, 3]  int32  read, write, checkpoint
    arrived: Tensor  # [max_reqs, key_heads]  int32  all 0 between kernels


class TritonLinear(StateBackend[LinearBuffers, LinearPlan | DecodePlan, Inputs]):
    """A kind adds `kind` and `extend`.  Runs on CUDA, and on a CPU through Triton's interpreter
    (TRITON_INTERPRET=1), slowly."""

    name = "triton"
    kept_fields = frozenset({"arrived"})
    capabilities = StateCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
        graph=GraphSupport.ALWAYS,
        part_dtypes=frozenset({torch.float32}),
        max_conv_width=8,
    )

    def unsupported_reasons(self, wanted: StateConfig) -> list[str]:
        """Capabilities, whether Triton can run on this device, how large keys and rounds are."""
        reasons = super().unsupported_reasons(wanted) + triton_reasons(wanted.device_type)
        key_dim = LinearShape.of({part.name: part.shape for part in wanted.parts}).key_dim
        if key_dim > MOST_KEY_DIM:
            reasons.append(f"keys of {key_dim} numbers, of up to {MOST_KEY_DIM}")
        elif key_dim * wanted.dtype.itemsize > MOST_KEY_BYTES:
            most = MOST_KEY_BYTES // wanted.dtype.itemsize
            reasons.append(f"keys of {key_dim} numbers in {wanted.dtype}, of up to {most}")
        if wanted.round_rows > MOST_ROUND_ROWS:
            reasons.append(f"rounds of {wanted.round_rows} tokens, of up to {MOST_ROUND_ROWS}")
        return reasons

    def make_buffers(self, limits: StateLimits) -> LinearBuffers:
        return linear_buffers(limits)

    def plan(
        self, view: StepView, group: GroupView, buffers: LinearBuffers, *, is_round: bool
    ) -> LinearPlan | DecodePlan:
        shape, reqs = shape_of(buffers), view.padded_reqs
        is_step = not is_round and view.padded_tokens == reqs and view.max_extend_len == 1
        if is_step and reqs * shape.value_size <= MOST_STEP_VALUES:
            return DecodePlan(shape=shape, slots=group.page_table, arrived=buffers.arrived)
        return plan_rows(view, group, buffers, is_round=is_round)

    def commit(
        self,
        view: StepView,
        group: GroupView,
        layer: StateLayer,
        buffers: LinearBuffers,
        *,
        path: Tensor,
        num_kept: Tensor,
    ) -> None:
        at, tokens = layer.index, view.padded_tokens
        commit_states(
            layer.parts[STATE],
            layer.parts[CONV],
            group.page_table,
            k=buffers.kept_k[at, :tokens],
            u=buffers.kept_u[at, :tokens],
            summed=buffers.kept_decay[at, :tokens],
            inputs=buffers.kept_inputs[at, :tokens],
            path=path,
            num_kept=num_kept,
        )


def extend_heads(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rates: HeadRates,
    skip: Tensor | None,
    layer: StateLayer,
    plan: LinearPlan | DecodePlan,
    *,
    channels: HeadChannels,
    eps: float | None,
    scale: float,
    is_delta: bool,
    gate: Gate | None = None,
) -> tuple[Tensor, Tensor | None]:
    """([tokens, value_heads, value_dim] in the dtype of `rows`: one layer over the step's rows;
    with a gate, which only a `DecodePlan` takes, the squares of `GatedRows`).

    rows: [tokens, parts, channels // parts] before the convolution of `weight` and `bias`;
    skip: [value_heads] or None; channels, eps, scale: as of `state_inputs`; skip, is_delta: as of
    `Rates`.  Writes the requests' slots, or keeps a round.
    """
    shape, tokens = plan.shape, rows.shape[0]
    if isinstance(plan, DecodePlan):
        out = rows.new_empty((tokens, shape.value_heads, shape.value_dim))
        step = StepInputs(rows, weight, bias, layer.parts[CONV], plan.slots)
        squares = state_step(
            step,
            channels,
            rates,
            layer.parts[STATE],
            skip=skip,
            is_delta=is_delta,
            eps=eps,
            scale=scale,
            arrived=plan.arrived,
            out=out,
            gate=gate,
        )
        return out, squares
    assert gate is None, "these kernels gate nothing"
    made = Rates(*made_rates(rates), skip, is_delta)
    kept = plan.kept
    given = ConvInputs(rows, weight, bias, layer.parts[CONV], plan.slots, plan.places)
    heads = head_rows(
        rows,
        tokens,
        (shape.key_heads, shape.key_dim),
        (shape.value_heads, shape.value_dim),
        torch.float32 if plan.chunks is None else rows.dtype,
    )
    out = torch.empty_like(heads.v)
    inputs, left = None, None
    if kept is not None:
        inputs = kept.kept_inputs[layer.index, :tokens]
        heads = heads._replace(k=kept.kept_k[layer.index, :tokens])
        left = Kept(kept.kept_u[layer.index, :tokens], kept.kept_decay[layer.index, :tokens])
    state_inputs(given, channels, eps=eps, scale=scale, out=heads, kept=inputs)
    state = layer.parts[STATE]
    if plan.chunks is None:
        state_rows(heads, made, plan.sees, state, given, kept=left, out=out)
    else:
        state_chunks(heads, made, plan.chunks, plan.starts, state, given, out=out)
    return out, None
