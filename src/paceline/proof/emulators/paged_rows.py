"""One kernel for the emulators of libraries that read a paged cache, and rules they share.

Lengths, offsets and tables are read when the operator runs, so a recorded graph replays them; rules
about them are checked there.
"""

import itertools
import math

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.custom_op import define_op

COUNTERS = 256  # bytes at the start of a workspace, which a kernel finds and leaves at 0
_TRASH = 0x5A


def require(library: str, holds: bool, name: str, expected: object, got: object) -> None:
    """Raise KernelArgumentError for a broken rule of a library."""
    if not holds:
        remedy = "see the library's interface: the real kernel would read elsewhere, or refuse"
        raise KernelArgumentError.about(
            f"{library} {name}", expected=expected, got=got, remedy=remedy
        )


def require_ints(library: str, rows: int, **lists: Tensor) -> None:
    """Tables [rows, width] and lists [rows], int32 with a last stride of 1."""
    for name, tensor in lists.items():
        require(library, tensor.dtype == torch.int32, f"{name} dtype", torch.int32, tensor.dtype)
        require(library, len(tensor) == rows, f"rows of {name}", rows, len(tensor))
        last = tensor.stride(-1)
        require(library, last == 1, f"last stride of {name}", 1, last)


def attend_rows(
    library: str,
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor,  # [num_pages, page_size, kv_heads, head_dim]
    v: Tensor,  # [num_pages, page_size, kv_heads, v_head_dim]
    *,
    page_tables: Tensor,  # [rows, width]  int32
    kv_lens: Tensor,  # [rows]  int32
    cu_seqlens_q: Tensor,  # [rows + 1]  int32
    scale: float,
    causal: bool,
    most_keys: int,
    window_left: int = -1,
    sinks: Tensor | None = None,  # [heads]
    workspace: Tensor | None = None,  # [bytes]  one of zeroed counters; mutated by those who trash
    trashes: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, v_head_dim], lse [tokens, heads] float32, natural, without the sinks.

    A row with queries and no key gives NaN, as junk would be found.
    trashes: the kernel leaves numbers in the workspace; others need its counters at 0.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if workspace is not None:
        _WORKSPACE(library, workspace[:COUNTERS], trashes)
    _ATTEND(
        library,
        q,
        k,
        v,
        page_tables,
        kv_lens,
        cu_seqlens_q,
        scale,
        causal,
        most_keys,
        window_left,
        sinks,
        out,
        lse,
    )
    return out, lse


# --- the kernels ----------------------------------------------------------------------------------


def _use_workspace(library: str, counters: Tensor, trashes: bool) -> None:
    if trashes:
        counters.fill_(_TRASH)
    else:
        found = int(counters.count_nonzero())
        require(library, not found, "counters in the workspace", "all 0", f"{found} others")


def _attend(
    library: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_tables: Tensor,
    kv_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    causal: bool,
    most_keys: int,
    window_left: int,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Row by row.  Whole pages are loaded: a dead slot of V is multiplied by 0."""
    offsets, lens, size = cu_seqlens_q.tolist(), kv_lens.tolist(), k.shape[1]
    extends = [end - start for start, end in itertools.pairwise(offsets)]
    is_whole = offsets[0] == 0 and offsets[-1] == len(q) and min(extends) >= 0
    expected = f"from 0 to {len(q)}, never falling"
    require(library, is_whole, "query offsets", expected, offsets)
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        keys, queries = lens[row], end - start
        if not queries:
            continue
        require(library, keys <= most_keys, "keys of a row", f"at most {most_keys}", keys)
        if not keys:
            out[start:end], lse[start:end] = math.nan, math.nan
            continue
        needed, width = -(-keys // size), page_tables.shape[1]
        require(library, needed <= width, "width of tables", f"at least {needed} pages", width)
        pages = page_tables[row, :needed].long()
        is_inside = bool(((pages >= 0) & (pages < len(k))).all())
        require(library, is_inside, "page ids", f"below {len(k)}", pages.tolist())
        at = torch.arange(needed * size)
        own = torch.arange(queries).unsqueeze(1) + (keys - queries)
        seen = (at < keys).expand(queries, -1)
        if causal:
            seen = seen & (at <= own)
        if window_left >= 0:
            seen = seen & (at >= own - window_left)
        keys_of, values_of = (cache[pages].flatten(0, 1) for cache in (k, v))
        found = _softmax(q[start:end], keys_of, values_of, seen, scale, sinks)
        out[start:end], lse[start:end] = found


def _softmax(
    q: Tensor,  # [queries, heads, head_dim]
    k: Tensor,  # [loaded, kv_heads, head_dim]
    v: Tensor,  # [loaded, kv_heads, v_head_dim]
    seen: Tensor,  # [queries, loaded]  bool
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out [queries, heads, v_head_dim], lse [queries, heads] float32.

    Scores and sums are float32; weights are rounded to the dtype of v before they meet it.
    """
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [queries, kv_heads, group, head_dim]
    scores = torch.einsum("qngd,knd->qngk", grouped, k.float()) * scale
    scores = scores.flatten(1, 2).masked_fill(~seen.unsqueeze(1), -math.inf)
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest.masked_fill(highest == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    lse = (highest + total.log()).squeeze(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1) - highest)
    spread = weights.to(v.dtype).float().unflatten(1, (k.shape[1], -1))
    mixed = torch.einsum("qngk,knd->qngd", spread, v.float()).flatten(1, 2)
    return (mixed / total).to(q.dtype), lse


_WORKSPACE = define_op(
    "emulated_workspace(str library, Tensor(a!) counters, bool trashes) -> ()", cpu=_use_workspace
)
_ATTEND = define_op(
    "emulated_paged_rows(str library, Tensor q, Tensor k, Tensor v, Tensor page_tables, Tensor"
    " kv_lens, Tensor cu_seqlens_q, float scale, bool causal, int most_keys, int window_left,"
    " Tensor? sinks, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_attend,
)
