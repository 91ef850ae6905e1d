"""Gated delta net (arXiv:2412.06464), one token after another: convolution, unit queries and keys,
decay, correction of what the state says of the key, reading."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.model.config import RowPart
from paceline.proof.oracle.methods.recurrence import Recurrence, State

_KEY_HEADS, _PER_KEY, _KEY_DIM, _VALUE_DIM, _TAPS = 2, 2, 8, 6, 4
_HEADS = _KEY_HEADS * _PER_KEY
_OF_HEAD = (_KEY_DIM, _KEY_DIM, _PER_KEY * _VALUE_DIM)  # query, key, values
_CHANNELS = _KEY_HEADS * sum(_OF_HEAD)


class GatedDelta(Recurrence):
    """A token brings its channels, key head by key head, and of each value head a number for its
    decay and one for its rate."""

    kind = "gdn"
    parts = (
        RowPart("conv", (_CHANNELS, _TAPS - 1)),
        RowPart("state", (_HEADS, _KEY_DIM, _VALUE_DIM), dtype="float32"),
    )
    width = _CHANNELS + 2 * _HEADS
    out_shape = (_HEADS, _VALUE_DIM)

    def given(self, rows: Tensor) -> Any:
        qkv, decay, rate = rows.split((_CHANNELS, _HEADS, _HEADS), dim=1)
        return {
            "qkv": qkv.unflatten(1, (_KEY_HEADS, -1)),
            "conv_weight": _taps(rows.dtype, rows.device),
            "rates": (-decay.float().abs(), rate.float().sigmoid()),
        }

    def step(self, state: State, row: Tensor) -> tuple[State, Tensor]:
        raw, decay, rate = row.split((_CHANNELS, _HEADS, _HEADS))
        seen = torch.cat((state["conv"], raw.unsqueeze(1)), 1)
        total = (seen * _taps(row.dtype, row.device)).sum(1)
        mixed = total / (1 + torch.exp(-total))
        query, key, values = mixed.view(_KEY_HEADS, -1).split(_OF_HEAD, dim=1)
        query, key = (x / torch.sqrt((x * x).sum(1, keepdim=True) + 1e-6) for x in (query, key))
        query, key = (x.repeat_interleave(_PER_KEY, 0) for x in (query, key))  # [heads, key]
        kept = torch.exp(-decay.abs()).view(-1, 1, 1) * state["state"]  # [heads, key, value]
        wrong = values.reshape(_HEADS, _VALUE_DIM) - torch.einsum("hkv,hk->hv", kept, key)
        learnt = wrong / (1 + torch.exp(-rate)).unsqueeze(1)
        matrices = kept + key.unsqueeze(2) * learnt.unsqueeze(1)
        outs = torch.einsum("hkv,hk->hv", matrices, query) / _KEY_DIM**0.5
        return {"conv": seen[:, 1:], "state": matrices}, outs


@cache  # nobody writes to it
def _taps(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[channels, taps] other numbers for each, exact in every format."""
    at = torch.arange(_CHANNELS * _TAPS, dtype=torch.float64, device=device)
    return (at.mul(1.3).sin() * 64).round().div(64).view(_CHANNELS, _TAPS).to(dtype)
