"""How every layer allocates its weights: on the device, uninitialised, without gradients."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a module's tensors live and in which dtype."""

    device: torch.device
    dtype: torch.dtype


def empty_parameter(*shape: int, placement: Placement) -> nn.Parameter:
    """An uninitialised inference parameter; the loader fills it in place."""
    data = torch.empty(shape, device=placement.device, dtype=placement.dtype)
    return nn.Parameter(data, requires_grad=False)


def empty_matrix(rows: int, columns: int, *, placement: Placement) -> nn.Parameter:
    """An uninitialised [rows, columns] parameter in the memory order its product reads fastest.

    float32 on a CPU is stored column by column (see kernels.linear); everything else row by row.
    """
    return _empty_matrices(rows, columns, placement=placement)


def empty_matrices(count: int, rows: int, columns: int, *, placement: Placement) -> nn.Parameter:
    """[count, rows, columns] of such matrices, one behind the other."""
    return _empty_matrices(count, rows, columns, placement=placement)


def _empty_matrices(*shape: int, placement: Placement) -> nn.Parameter:
    if placement.device.type != "cpu" or placement.dtype != torch.float32:
        return empty_parameter(*shape, placement=placement)
    *count, rows, columns = shape
    stored = torch.empty(*count, columns, rows, device=placement.device, dtype=placement.dtype)
    return nn.Parameter(stored.mT, requires_grad=False)
