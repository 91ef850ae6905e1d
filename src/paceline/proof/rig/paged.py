"""What every paged world without a runner shares: pages in no order, and the unit of an error.

A rig's world is placed for a case, steps through a real runner and is judged by the oracle; the
worlds of benches and of kernels' tests are tensors of one step, judged by the definition.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.paged_attention import (
    PagedCache,
    PagedRows,
    Weighing,
    paged_attention_reference,
)


def permuted_pages(
    kv_lens: Sequence[int], page_size: int, generator: torch.Generator, *, spare: int
) -> tuple[Tensor, int]:
    """A page table over permuted pages, and the pages of its pool: page 0, which nobody holds, and
    `spare` others are left over.

    The table is [reqs, pages of the longest] int32, on the generator's device; 0 where unused.
    """
    counts = [-(-length // page_size) for length in kv_lens]
    num_pages = 1 + sum(counts) + spare
    device = generator.device
    pages = 1 + torch.randperm(num_pages - 1, generator=generator, device=device)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    taken = 0
    for row, count in enumerate(counts):
        table[row, :count] = pages[taken : taken + count]
        taken += count
    return table, num_pages


def errors(
    out: Tensor, q: Tensor, cache: PagedCache, rows: PagedRows, weighing: Weighing
) -> Tensor:
    """[tokens] float64: how far `out` is from the definition; up to 1 is right, NaN is infinite.

    The unit is a token's own: twice the error of plain torch in the dtype of q, and one rounding,
    so that a long request's small values are not measured with a short one's large ones.
    """
    exact, plain = (
        paged_attention_reference(q, cache, rows, weighing, compute_dtype=dtype)[0].double()
        for dtype in (torch.float64, q.dtype)
    )
    unit = 2.0 * _largest(plain - exact) + torch.finfo(q.dtype).eps * _largest(exact)
    unit += torch.finfo(torch.float32).tiny  # of a token that sees no key
    return (_largest(out.double() - exact) / unit).nan_to_num(float("inf"))


def _largest(values: Tensor) -> Tensor:
    """[tokens]"""
    return values.abs().amax(dim=(1, 2))
