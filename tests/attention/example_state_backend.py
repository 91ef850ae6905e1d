"""A complete state backend: of each request a decaying sum of what its tokens bring.

s = decay * s + x, token by token; what a layer hands on is s behind each token.  Of the rows of a
step it is a product with a matrix of weights: decay to the power of the distance along the branch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.contract import GraphSupport
from paceline.attention.states import StateBackend, StateCapabilities, StateLayer, StateLimits
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import GroupView, StepView

PART = "sum"  # the one part of its groups: [width]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumBuffers:
    """Everything whose address a graph may hold, at its largest."""

    weights: Tensor  # [max_tokens * max_tokens]  float32
    decays: Tensor  # [max_tokens]  float32
    kept: Tensor  # [num_layers, max_round_tokens, width]  float32  inputs of a round's rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumPlan:
    """Views one step may read; nothing assigns to it after `plan`."""

    weights: Tensor  # [padded_tokens, padded_tokens]  float32  how much of row j row i sees
    decays: Tensor  # [padded_tokens, 1]  float32  how much of the state before the step
    kept: Tensor | None  # [num_layers, padded_tokens, width]  float32  of a round
    group: GroupView
    req_ids: Tensor  # [padded_tokens]  int64
    last: Tensor  # [padded_reqs]  int64


class SumBackend(StateBackend[SumBuffers, SumPlan, Tensor]):
    """Inputs: [padded_tokens, width] float32."""

    kind = "sum"
    name = "sum-example"
    capabilities = StateCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32}),
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
        graph=GraphSupport.ALWAYS,
    )

    def __init__(self, decay: float = 0.875) -> None:
        self._decay = decay

    def make_buffers(self, limits: StateLimits) -> SumBuffers:
        """Called once; `plan` cuts these to the size of a step."""
        (width,) = limits.parts[PART]
        kept = (limits.num_layers, limits.max_round_tokens, width)
        return SumBuffers(
            weights=torch.zeros(limits.max_tokens**2, device=limits.device),
            decays=torch.zeros(limits.max_tokens, device=limits.device),
            kept=torch.zeros(kept, device=limits.device),
        )

    def plan(
        self, view: StepView, group: GroupView, buffers: SumBuffers, *, is_round: bool
    ) -> SumPlan:
        """Device-only, static shapes, in place: the same call in eager, capture and replay."""
        tokens, owners = view.padded_tokens, view.req_ids
        distance = view.positions.unsqueeze(1) - view.positions  # [tokens, tokens]
        sees = owners.unsqueeze(1) == owners
        if view.tree_mask is None:
            sees = sees & (distance >= 0)
        else:
            starts = view.cu_seqlens_q.index_select(0, owners)
            rows = torch.arange(tokens, device=owners.device) - starts
            sees = sees & view.tree_mask.index_select(1, rows)
        weights = buffers.weights[: tokens**2].view(tokens, tokens)
        weights.copy_(self._power(distance) * sees)
        decays = buffers.decays[:tokens]
        decays.copy_(self._power(view.positions + 1 - view.prefix_lens.index_select(0, owners)))
        return SumPlan(
            weights=weights,
            decays=decays.unsqueeze(1),
            kept=buffers.kept[:, :tokens] if is_round else None,
            group=group,
            req_ids=owners,
            last=view.logits_loc,
        )

    def extend(self, inputs: Tensor, layer: StateLayer, plan: SumPlan) -> Tensor:
        """One layer over the step's rows; of a round it keeps the rows and writes no slot."""
        before = _read(layer, plan.group).index_select(0, plan.req_ids)
        sums = plan.weights @ inputs + plan.decays * before
        if plan.kept is not None:
            plan.kept[layer.index].copy_(inputs)
        else:
            written = plan.group.write_slots.long()
            layer.parts[PART].index_copy_(0, written, sums.index_select(0, plan.last))
        return sums

    def commit(
        self,
        view: StepView,
        group: GroupView,
        layer: StateLayer,
        buffers: SumBuffers,
        *,
        path: Tensor,
        num_kept: Tensor,
    ) -> None:
        """Write the slot of each request: the state behind the first `num_kept` rows of `path`."""
        reqs, longest = path.shape
        kept = buffers.kept[layer.index, : view.padded_tokens]
        rows = kept.view(reqs, view.max_extend_len, -1)  # [reqs, rows, width]
        taken = rows.gather(1, path.unsqueeze(2).expand(-1, -1, rows.shape[2]))
        behind = num_kept.unsqueeze(1) - 1 - torch.arange(longest, device=path.device)
        weights = self._power(behind) * (behind >= 0)
        sums = self._power(num_kept).unsqueeze(1) * _read(layer, group)
        sums += (weights.unsqueeze(2) * taken).sum(1)
        layer.parts[PART].index_copy_(0, group.write_slots.long(), sums)

    def _power(self, exponents: Tensor) -> Tensor:
        """decay ** exponents, float32; of negative ones anything finite."""
        return torch.pow(self._decay, exponents.clamp(min=0).float())


def _read(layer: StateLayer, group: GroupView) -> Tensor:
    """[padded_reqs, width] the state before the step; slot 0 means zeros, whatever it holds."""
    slots = group.read_slots.long()
    return layer.parts[PART].index_select(0, slots).masked_fill(slots.unsqueeze(1) == 0, 0.0)
