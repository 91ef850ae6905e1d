"""prefix_rows: neighbouring rows of many requests' prefixes, out of a paged cache, side by side.

Latents are expanded to keys and values in pieces of a prefix; what is expanded is what the cache
holds, so that both ways to attend see the same rounding.  A piece is a range of positions: of each
request the rows it has there, of an exhausted one none.

Worked example, prefixes of 5, 0 and 2 rows, positions from 1 on, up to 4:  starts [0, 3, 3, 4]

    row        0    1    2    3    4
    request    0    0    0    2    -
    position   1    2    3    1    -     behind the last: 0
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.checks import check_index


def prefix_rows_reference(
    cache: Tensor, page_table: Tensor, starts: Tensor, first: int, out: Tensor
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `prefix_rows`."""
    rows = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    ends = starts[1:].contiguous()
    requests = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
    is_live = rows < ends[-1]
    positions = torch.where(is_live, rows - starts.index_select(0, requests) + first, 0)
    page_size = cache.shape[1]
    pages = page_table[requests, positions // page_size].long()
    found = cache[pages, positions % page_size, 0]
    out.copy_(torch.where(is_live.unsqueeze(1), found, 0))


def _launch(cache: Tensor, page_table: Tensor, starts: Tensor, first: int, out: Tensor) -> None:
    require_triton("prefix_rows", otherwise="attend to latents as they are")
    from paceline.kernels._triton.prefix_rows import launch_prefix_rows

    launch_prefix_rows(cache, page_table, starts, first, out)


_PREFIX_ROWS = define_op(
    "prefix_rows(Tensor cache, Tensor page_table, Tensor starts, int first, Tensor(a!) out) -> ()",
    cpu=prefix_rows_reference,
    cuda=_launch,
)


def prefix_rows(
    cache: Tensor, page_table: Tensor, starts: Tensor, *, first: int, num_rows: int
) -> Tensor:
    """[num_rows, width] in the cache's dtype: rows of each request from position `first` on.

    cache: [num_pages, page_size, 1, width], pages may be strided; page_table: [reqs, max_pages]
    int32; starts: [reqs + 1] int32 prefix sums of rows per request, the last at most num_rows (on
    the device, and trusted).  Rows behind it are 0.  Graph-safe: the grid depends on num_rows
    alone.  Raises KernelArgumentError.
    """
    if cache.dim() != 4 or cache.shape[2] != 1 or cache.stride(3) != 1:
        reject(
            "cache",
            expected="[num_pages, page_size, 1, width] with contiguous rows",
            got=cache,
            remedy="pass a pool of latents",
        )
    reqs = page_table.shape[0]
    check_index("page_table", page_table, (reqs, page_table.shape[-1]))
    check_index("starts", starts, (reqs + 1,))
    out = cache.new_empty(num_rows, cache.shape[3])
    _PREFIX_ROWS(cache, page_table, starts, first, out)
    return out
