"""The operators behind the emulated wrappers: what the kernels read, they read when they run."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.proof.emulators.flashinfer_rules import error, require

_MARK = 0x5EED  # the first number of a schedule
NO_KEY = -5e4  # the library's lse where no key is visible: its infinity (math.cuh)


def write_schedule(
    schedule: Tensor,  # [bytes]  uint8
    qo_indptr: Sequence[int],  # [reqs + 1]
    kv_indptr: Sequence[int],  # [reqs + 1]
    last_page_len: Sequence[int] = (),  # [reqs]  of pages
) -> None:
    """Leave a plan in its workspace."""
    numbers = torch.tensor([_MARK, *qo_indptr, *kv_indptr, *last_page_len], dtype=torch.int32)
    schedule[: numbers.nbytes].view(torch.int32).copy_(numbers)


def _require_schedule(
    schedule: Tensor, qo_indptr: list[int], kv_indptr: list[int], last_page_len: list[int]
) -> None:
    """The planned lengths are those the kernels find on the device."""
    executed = [*qo_indptr, *kv_indptr, *last_page_len]
    mark, *planned = schedule[: 4 * (1 + len(executed))].view(torch.int32).tolist()
    require(mark == _MARK, "schedule", "a plan in int_workspace_buffer", f"mark {mark}")
    require(planned == executed, "planned lengths", f"the executed {executed}", planned)


def _emulate_paged(
    q: Tensor,  # [rows, heads, head_dim]
    k_cache: Tensor,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache: Tensor,  # [num_pages, page_size, kv_heads, head_dim]
    qo_indptr: Tensor,  # [reqs + 1]  int32
    kv_indptr: Tensor,  # [reqs + 1]  int32
    kv_indices: Tensor,  # [most pages]  int32
    last_page_len: Tensor,  # [reqs]  int32
    schedule: Tensor,  # [bytes]  uint8
    causal: bool,
    window_left: int,
    soft_cap: float,
    scale: float,
    out: Tensor,  # [rows, heads, head_dim]
    lse: Tensor,  # [rows, heads]  float32
) -> None:
    """Request by request.  A key that is masked is loaded: its value is multiplied by 0."""
    offsets, pages, last = qo_indptr.tolist(), kv_indptr.tolist(), last_page_len.tolist()
    _require_schedule(schedule, offsets, pages, last)
    page_size, num_pages = k_cache.shape[1], k_cache.shape[0]
    for index, (start, end) in enumerate(itertools.pairwise(offsets)):
        used = kv_indices[pages[index] : pages[index + 1]].long()
        if len(used) and not (used.min() >= 0 and used.max() < num_pages):
            raise error("paged_kv_indices", f"pages below {num_pages}", used.tolist())
        keys = max(len(used) - 1, 0) * page_size + last[index]
        seen = _seen(end - start, keys, causal=causal, window_left=window_left)
        out[start:end], lse[start:end] = _attend(
            q[start:end].float(),
            k_cache[used].flatten(0, 1)[:keys].float(),
            v_cache[used].flatten(0, 1)[:keys].float(),
            seen,
            scale=scale,
            soft_cap=soft_cap,
        )


def _emulate_ragged(
    q: Tensor,  # [rows, heads, head_dim]
    k: Tensor,  # [keys, kv_heads, head_dim]
    v: Tensor,  # [keys, kv_heads, head_dim]
    qo_indptr: Tensor,  # [reqs + 1]  int32
    kv_indptr: Tensor,  # [reqs + 1]  int32
    mask: Tensor,  # [bytes]  uint8
    mask_indptr: Tensor,  # [reqs + 1]  int32  in bytes
    schedule: Tensor,  # [bytes]  uint8
    soft_cap: float,
    scale: float,
    out: Tensor,  # [rows, heads, head_dim]
    lse: Tensor,  # [rows, heads]  float32
) -> None:
    """Request by request, under its bits."""
    offsets, keys = qo_indptr.tolist(), kv_indptr.tolist()
    _require_schedule(schedule, offsets, keys, [])
    require(keys[-1] <= len(k), "kv_indptr[-1]", f"at most {len(k)} keys", keys[-1])
    for index, (start, end) in enumerate(itertools.pairwise(offsets)):
        first, last = keys[index], keys[index + 1]
        seen = _unpacked(mask, int(mask_indptr[index]), end - start, last - first)
        out[start:end], lse[start:end] = _attend(
            q[start:end].float(),
            k[first:last].float(),
            v[first:last].float(),
            seen,
            scale=scale,
            soft_cap=soft_cap,
        )


def _unpacked(mask: Tensor, start: int, queries: int, keys: int) -> Tensor:
    """[queries, keys] bool from the bits at a byte offset, the lowest bit of a byte first."""
    end = start + -(-queries * keys // 8)
    require(start >= 0 and end <= len(mask), "mask_indptr", f"bytes below {len(mask)}", end)
    bits = mask[start:end].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[: queries * keys].view(queries, keys).bool()


def _seen(queries: int, keys: int, *, causal: bool, window_left: int) -> Tensor:
    """[queries, keys] bool: the last query is at the last key, causal or not."""
    own = torch.arange(queries).unsqueeze(1) + (keys - queries)
    at = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= at <= own
    if window_left >= 0:
        seen &= at >= own - window_left
    return seen


def _attend(
    q: Tensor,  # [queries, heads, head_dim]  float32
    k: Tensor,  # [keys, kv_heads, head_dim]  float32
    v: Tensor,  # [keys, kv_heads, head_dim]  float32
    seen: Tensor,  # [queries, keys]  bool
    *,
    scale: float,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """out [queries, heads, head_dim], lse base 2 [queries, heads]; 0 and NO_KEY without a key."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q, keys) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(~seen.unsqueeze(1), 0.0)
    return torch.einsum("qhk,khd->qhd", weights, values), (lse / math.log(2.0)).clamp(min=NO_KEY)


emulated_paged = define_op(
    "emulated_flashinfer_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, "
    "Tensor kv_indptr, Tensor kv_indices, Tensor last_page_len, Tensor schedule, bool causal, "
    "int window_left, float soft_cap, float scale, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_emulate_paged,
)
emulated_ragged = define_op(
    "emulated_flashinfer_ragged(Tensor q, Tensor k, Tensor v, Tensor qo_indptr, Tensor kv_indptr, "
    "Tensor mask, Tensor mask_indptr, Tensor schedule, float soft_cap, float scale, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_emulate_ragged,
)
