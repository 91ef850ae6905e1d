"""compact_kv: bring the KV of the rows that were accepted together, in every layer of a group.

Worked example: one request whose 4 rows lie in the slots 9, 10, 24, 25 (the page ends at 11).

    path   [0, 2, 3]       rows 0, 2 and 3 were accepted
    slot 10 <- slot 24     row 2 comes to where row 1 was
    slot 24 <- slot 25     row 3 to where row 2 was
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type


def compact_kv_reference(pools: Sequence[Tensor], loc: Tensor, path: Tensor) -> None:
    """The definition, and the CPU's path; arguments and mutation as `compact_kv`."""
    sources = loc.gather(1, path[:, 1:]).flatten()
    destinations = loc[:, 1 : path.shape[1]].flatten()
    for pool in pools:
        slots = pool.view(torch.uint8).view(pool.shape[0], pool.shape[1] * pool.shape[2], -1)
        slots.index_copy_(1, destinations, slots.index_select(1, sources))


def _compact_kv_cuda(pools: Sequence[Tensor], loc: Tensor, path: Tensor) -> None:
    from paceline.kernels._triton.compact_kv import launch_compact_kv

    launch_compact_kv(pools, loc, path)


_COMPACT_KV = define_op(
    "compact_kv(Tensor(a!)[] pools, Tensor loc, Tensor path) -> ()",
    cpu=None,
    cuda=_compact_kv_cuda,
)


def compact_kv(pools: Sequence[Tensor], loc: Tensor, path: Tensor) -> None:
    """Slot loc[r, j] <- slot loc[r, path[r, j]], for j = 1, 2, ..., of every layer.

    pools: of [layers, num_pages, page_size, heads, dim], contiguous, of any dtype; mutated.  loc:
    [padded_reqs, n] int64 slots of the step's rows; padded rows: slot 0 alone.  path: [padded_reqs,
    max_path <= n] int64, ascending, so that no row is overwritten before it is read.  Graph-safe:
    shapes alone decide the grid.  Raises KernelArgumentError.
    """
    for index, pool in enumerate(pools):
        if pool.dim() != 5 or not pool.is_contiguous():
            reject(
                f"pools[{index}]",
                expected="contiguous [layers, num_pages, page_size, heads, dim]",
                got=pool,
                remedy="pass a pool's whole tensors, not a layer's",
            )
    for name, tensor in {"loc": loc, "path": path}.items():
        if tensor.dim() != 2 or tensor.dtype != torch.int64 or not tensor.is_contiguous():
            reject(
                name,
                expected="contiguous int64 [padded_reqs, columns]",
                got=tensor,
                remedy="pass the round's slots and what commit wrote",
            )
    if device_type(loc.device) == "cpu":
        compact_kv_reference(pools, loc, path)
        return
    _COMPACT_KV(list(pools), loc, path)
