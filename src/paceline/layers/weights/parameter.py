"""How every layer allocates its weights: on the device, uninitialised, without gradients."""

from dataclasses import dataclass

import torch
from torch import nn

from paceline.kernels.all_reduce import Exchange
from paceline.kernels.linear_cpu import is_emulated
from paceline.kernels.stand_in import device_type
from paceline.layers.weights.weight_format import WeightFormats


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a module's tensors live, in which dtype, how its weights are stored,
    and how ranks of one model reach each other."""

    device: torch.device
    dtype: torch.dtype  # of activations, and of what has no format: norms, sinks
    formats: WeightFormats
    exchange: Exchange | None = None  # of ranks that share a model; None: one process has it


def empty_parameter(*shape: int, placement: Placement) -> nn.Parameter:
    """An uninitialised inference parameter; the loader fills it in place."""
    data = torch.empty(shape, device=placement.device, dtype=placement.dtype)
    return nn.Parameter(data, requires_grad=False)


def empty_scale(*shape: int, placement: Placement) -> nn.Parameter:
    """A float32 parameter of NaN, which shows what nobody writes; see `WeightFormat.scales`."""
    data = torch.full(shape, torch.nan, device=placement.device, dtype=torch.float32)
    return nn.Parameter(data, requires_grad=False)


def empty_matrix(
    rows: int, columns: int, *, placement: Placement, has_bias: bool = False
) -> nn.Parameter:
    """An uninitialised [rows, columns] parameter in the memory order its product reads fastest.

    On a CPU float32 is stored column by column (see kernels.linear), and so is bfloat16 where it is
    emulated by one thread and has no bias (see kernels.linear_cpu); everything else row by row.
    """
    one_thread = device_type(placement.device) == "cpu" and torch.get_num_threads() == 1
    if one_thread and is_emulated(placement.dtype) and not has_bias:
        return _by_columns(rows, columns, placement=placement)
    return _empty_matrices(rows, columns, placement=placement)


def empty_matrices(count: int, rows: int, columns: int, *, placement: Placement) -> nn.Parameter:
    """[count, rows, columns] of such matrices, one behind the other."""
    return _empty_matrices(count, rows, columns, placement=placement)


def _empty_matrices(*shape: int, placement: Placement) -> nn.Parameter:
    if device_type(placement.device) != "cpu" or placement.dtype != torch.float32:
        return empty_parameter(*shape, placement=placement)
    return _by_columns(*shape, placement=placement)


def _by_columns(*shape: int, placement: Placement) -> nn.Parameter:
    *count, rows, columns = shape
    stored = torch.empty(*count, columns, rows, device=placement.device, dtype=placement.dtype)
    return nn.Parameter(stored.mT, requires_grad=False)
