"""The smallest mixer beside attention: a token adds the one before it in its step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.attention.contract import Limits
from paceline.attention.mixers import Mixer
from paceline.kernels.step_view import StepView
from paceline.layers.attention import StepContext


@dataclass(frozen=True, slots=True, eq=False)
class ShiftBuffers:
    follows: Tensor  # [max_tokens]  float32  1: the token before is of the same request


class ShiftMixer(Mixer[ShiftBuffers, Tensor]):
    """Its plan: [padded_tokens] float32, a view of its buffers."""

    kind = "shift"
    name = "toy"

    def make_buffers(self, limits: Limits) -> ShiftBuffers:
        return ShiftBuffers(torch.zeros(limits.max_tokens, device=limits.device))

    def plan(self, view: StepView, buffers: ShiftBuffers) -> Tensor:
        follows = buffers.follows[: view.padded_tokens]
        follows[:1].zero_()
        follows[1:].copy_(view.req_ids[1:] == view.req_ids[:-1])
        return follows

    def mix(self, layer_id: int, *inputs: Tensor, plan: Tensor) -> Tensor:
        (x,) = inputs
        before = torch.cat((x.new_zeros(1, x.shape[1]), x[:-1]))
        return x + before * plan[:, None]


class Forgetful(ShiftMixer):
    """Plans the first step alone."""

    planned = False

    def plan(self, view: StepView, buffers: ShiftBuffers) -> Tensor:
        if type(self).planned:
            return buffers.follows[: view.padded_tokens]
        type(self).planned = True
        return super().plan(view, buffers)


class Strange(ShiftMixer):
    kind = "twist"


class TokenShift(nn.Module):
    """Stands where a layer's attention stands."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        return ctx.mix("shift", self.layer_id, x)
