"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), one token after another: a convolution over its
channels, then of every head S = exp(-a dt) S + B (dt x)^T and y = S^T C + D x."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.model.config import RowPart
from paceline.proof.oracle.methods.recurrence import Recurrence, State

_HEADS, _GROUPS, _HEAD_DIM, _STATE_SIZE, _WIDTH = 4, 2, 8, 16, 4
_INNER, _SHARED = _HEADS * _HEAD_DIM, _GROUPS * _STATE_SIZE
_CHANNELS = _INNER + 2 * _SHARED
_LEAST_STEP, _MOST_STEP = 0.125, 1.5


class Mamba2(Recurrence):
    """A token brings x, B and C of all heads and groups, which the convolution sees, and the time
    step of each head.  What a layer has learnt are fractions of small integers, other ones for
    every channel, tap and head."""

    kind = "mamba2"
    parts = (
        RowPart("conv", (_CHANNELS, _WIDTH - 1)),
        RowPart("state", (_HEADS, _STATE_SIZE, _HEAD_DIM), dtype="float32"),
    )
    width = _CHANNELS + _HEADS
    out_shape = (_HEADS, _HEAD_DIM)

    def rows(self, num: int, generator: torch.Generator) -> Tensor:
        """Time steps are positive."""
        rows = torch.randn(num, self.width, generator=generator, dtype=torch.float64)
        steps = torch.rand(num, _HEADS, generator=generator, dtype=torch.float64)
        rows[:, _CHANNELS:] = _LEAST_STEP + (_MOST_STEP - _LEAST_STEP) * steps
        return rows

    def given(self, rows: Tensor) -> Any:
        taps, bias, rates, skip = _learnt(rows.dtype, rows.device)
        steps = rows[:, _CHANNELS:].float()
        return {
            "xbc": rows[:, :_CHANNELS],
            "conv_weight": taps,
            "conv_bias": bias,
            "rates": (-rates.float() * steps, steps),
            "skip": skip,
        }

    def step(self, state: State, row: Tensor) -> tuple[State, Tensor]:
        taps, bias, rates, skip = _learnt(row.dtype, row.device)
        window = torch.cat((state["conv"], row[:_CHANNELS].unsqueeze(1)), dim=1)
        total = (window * taps).sum(1) + bias
        seen, steps = total / (1.0 + torch.exp(-total)), row[_CHANNELS:]
        x = seen[:_INNER].view(_HEADS, _HEAD_DIM)
        b = seen[_INNER : _INNER + _SHARED].view(_GROUPS, _STATE_SIZE)
        c = seen[_INNER + _SHARED :].view(_GROUPS, _STATE_SIZE)
        b, c = (each.repeat_interleave(_HEADS // _GROUPS, 0) for each in (b, c))  # [heads, size]
        kept = torch.exp(-rates * steps).view(-1, 1, 1) * state["state"]  # [heads, size, dim]
        matrices = kept + b.unsqueeze(2) * (steps.unsqueeze(1) * x).unsqueeze(1)
        outs = torch.einsum("hsd,hs->hd", matrices, c) + skip.unsqueeze(1) * x
        return {"conv": window[:, 1:], "state": matrices}, outs


@cache  # nobody writes to it
def _learnt(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(taps [channels, width], bias [channels], rates [heads], skip [heads]), exact in every
    format."""
    channels = torch.arange(_CHANNELS, device=device, dtype=torch.float64)
    taps = torch.arange(_WIDTH, device=device, dtype=torch.float64)
    heads = torch.arange(_HEADS, device=device, dtype=torch.float64)
    by_tap = (5.0 * channels.unsqueeze(1) + 3.0 * taps) % 11.0 - 5.0
    exact = by_tap / 8.0, (channels % 7.0 - 3.0) / 16.0, (1.0 + heads) / 16.0, (heads - 1.5) / 2.0
    taps, bias, rates, skip = (each.to(dtype) for each in exact)
    return taps, bias, rates, skip
