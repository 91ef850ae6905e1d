"""sgl-kernel's CUTLASS kernel for latents as the backend calls it, on a CPU: this module is the
library.

One query of a row, no log-sum-exp.  A row without a key divides 0 by 0.

Source: sgl-kernel's `attention.py` of mid 2026.
"""

from functools import partial

import torch
from torch import Tensor

from paceline.proof.emulators.paged_rows import attend_rows, require_ints
from paceline.proof.emulators.paged_rows import require as require_of

RANK, ROPE_DIM, PAGE_SIZE, MOST_HEADS = 512, 64, 128, 128
_DTYPES = (torch.float16, torch.bfloat16)
_LIBRARY = "cutlass_mla"
_require = partial(require_of, _LIBRARY)


def cutlass_mla_get_workspace_size(max_seq_len: int, num_batches: int) -> int:
    """Bytes; a number that grows with the rows of a call."""
    for name, number in (("max_seq_len", max_seq_len), ("num_batches", num_batches)):
        _require(number > 0, name, "at least 1", number)
    return num_batches * MOST_HEADS * 4


def cutlass_mla_decode(
    q_nope: Tensor,  # [rows, heads, 512]
    q_pe: Tensor,  # [rows, heads, 64]
    kv_c_and_k_pe_cache: Tensor,  # [num_pages, 128, 576]
    seq_lens: Tensor,  # [rows]  int32
    page_table: Tensor,  # [rows, max_pages]  int32
    workspace: Tensor,  # [bytes]
    sm_scale: float,
) -> Tensor:
    """out [rows, heads, 512]."""
    cache, found = kv_c_and_k_pe_cache, (q_nope.dim(), q_pe.dim(), kv_c_and_k_pe_cache.dim())
    _require(found == (3, 3, 3), "dims of q_nope, q_pe and the cache", (3, 3, 3), found)
    rows, heads = q_nope.shape[:2]
    _require(q_pe.shape[:2] == (rows, heads), "rows and heads of q_pe", (rows, heads), q_pe.shape)
    widths, wanted = (q_nope.shape[2], q_pe.shape[2]), (RANK, ROPE_DIM)
    _require(widths == wanted, "width of q_nope and q_pe", wanted, widths)
    page = tuple(cache.shape[1:])
    _require(page == (PAGE_SIZE, RANK + ROPE_DIM), "page", (PAGE_SIZE, RANK + ROPE_DIM), page)
    _require(heads <= MOST_HEADS, "heads", f"at most {MOST_HEADS}", heads)
    _require(q_nope.dtype in _DTYPES, "q_nope dtype", "a 16-bit float", q_nope.dtype)
    dtypes = (q_pe.dtype, cache.dtype)
    _require(dtypes == (q_nope.dtype,) * 2, "dtype of q_pe and the cache", q_nope.dtype, dtypes)
    for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("the cache", cache)):
        _require(tensor.stride(-1) == 1, f"last stride of {name}", 1, tensor.stride(-1))
    require_ints(_LIBRARY, rows, seq_lens=seq_lens, page_table=page_table)
    width = page_table.shape[1]
    _require(width > 0, "width of page_table", "at least 1", width)
    needed = cutlass_mla_get_workspace_size(width * PAGE_SIZE, rows)
    got = workspace.nbytes
    _require(got >= needed, "bytes of workspace", f"at least {needed}", got)
    keys = cache.unsqueeze(2)
    out, _ = attend_rows(
        _LIBRARY,
        torch.cat((q_nope, q_pe), 2),
        keys,
        keys[..., :RANK],
        page_tables=page_table,
        kv_lens=seq_lens,
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32),
        scale=sm_scale,
        causal=False,
        most_keys=width * PAGE_SIZE,
    )
    return out
