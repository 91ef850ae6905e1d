"""pool_rows: of the hidden states of each request in a step one row: the last, the first, the mean.

Worked example: three requests of 2, 1 and 0 tokens; the last one is padding.

    hidden         [[1, 4], [3, 0], [5, 5]]
    cu_seqlens_q   [0, 2, 3, 3]
    last           [[3, 0], [5, 5], [0, 0]]
    cls            [[1, 4], [5, 5], [0, 0]]
    mean           [[2, 2], [5, 5], [0, 0]]
"""

import torch
from torch import Tensor

from paceline.core.modes import Pooling
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


def pool_rows_reference(hidden: Tensor, cu_seqlens_q: Tensor, pooling: str, out: Tensor) -> None:
    """The definition, and the CPU's path; arguments and mutation as `pool_rows`."""
    first, stop = cu_seqlens_q[:-1].long(), cu_seqlens_q[1:].long()
    lens = (stop - first).unsqueeze(1)
    if pooling == Pooling.MEAN:
        tokens = torch.arange(hidden.shape[0], device=hidden.device)
        reqs = torch.searchsorted(stop, tokens, right=True)
        sums = out.new_zeros(out.shape[0] + 1, out.shape[1])  # the last: rows behind all requests
        out.copy_(sums.index_add_(0, reqs, hidden.float())[:-1])
        out.div_(lens.clamp(min=1))
        return
    rows = first if pooling == Pooling.CLS else stop - 1
    out.copy_(hidden.index_select(0, rows.clamp(0, hidden.shape[0] - 1)))
    out.masked_fill_(lens == 0, 0.0)


def _pool_rows_cuda(hidden: Tensor, cu_seqlens_q: Tensor, pooling: str, out: Tensor) -> None:
    from paceline.kernels._triton.pool_rows import launch_pool_rows

    launch_pool_rows(hidden, cu_seqlens_q, pooling, out)


_POOL_ROWS = define_op(
    "pool_rows(Tensor hidden, Tensor cu_seqlens_q, str pooling, Tensor(a!) out) -> ()",
    cpu=pool_rows_reference,
    cuda=_pool_rows_cuda,
)


def pool_rows(hidden: Tensor, cu_seqlens_q: Tensor, pooling: Pooling, out: Tensor) -> None:
    """One row of each request.

    hidden: [tokens, width], any floating dtype, the last dimension contiguous; cu_seqlens_q:
    [padded_reqs + 1] int32, the last entry at most tokens; out: [padded_reqs, width] float32, the
    only thing mutated; 0 where a request has no tokens.  Sums are float32, in the order of the
    tokens on a CPU.  Graph-safe: shapes are static.  Raises KernelArgumentError.
    """
    shape = (cu_seqlens_q.shape[0] - 1, hidden.shape[1])
    if out.dtype is not torch.float32 or tuple(out.shape) != shape or out.stride(1) != 1:
        reject("out", expected=f"float32 {list(shape)}", got=out, remedy="see pool_rows")
    if hidden.stride(1) != 1:
        reject("hidden", expected="contiguous rows", got=hidden, remedy="pass a model's output")
    _POOL_ROWS(hidden, cu_seqlens_q, pooling.value, out)
