"""How many programs share the keys of a request, and what they leave for their merge.

The number is frozen into a graph, so it depends on padded sizes alone; how many of the splits have
work is decided on the device, from the lengths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.gpus import MOST_SMS
from paceline.kernels._check import reject

_PROGRAMS_PER_SM = 2
_MAX_SPLITS = 64
_MIN_KEYS = 64  # of a split: fewer are not worth a merge
FEW_ROWS = 64  # of a KV head, query tokens times heads of its group: keys are worth splitting
ROW_TILE = 16  # of them in one program
_INTERPRETER_SMS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitWorkspace:
    """What the splits of a launch leave for their merge; rows is the most tokens * splits."""

    partial_out: Tensor  # [rows, heads, v_head_dim]  float32
    partial_lse: Tensor  # [rows, heads]  float32  log2 units
    finished: Tensor  # [max_reqs, heads]  int32  splits done; 0 between launches


def decode_splits(
    num_reqs: int, num_kv_heads: int, *, max_keys: int | None = None, device: torch.device
) -> int:
    """How many splits a decode of `num_reqs` padded requests uses on `device`, 1..64.

    As many as let every multiprocessor hold two programs, whatever the lengths turn out to be, and
    no more than a request of `max_keys` can keep busy.
    """
    most = _PROGRAMS_PER_SM * _num_sms(device)
    splits = min(_MAX_SPLITS, most // max(1, num_reqs * num_kv_heads))
    return max(1, splits if max_keys is None else min(splits, -(-max_keys // _MIN_KEYS)))


def extend_splits(
    tokens: int,
    num_reqs: int,
    num_kv_heads: int,
    *,
    max_rows: int,
    max_keys: int,
    workspace: SplitWorkspace,
) -> int:
    """How many splits an extend uses: as a decode, where rows are few; 1 where they are many.

    `max_rows` is the query rows of a KV head: tokens of the longest request times the group.
    """
    if max_rows > FEW_ROWS:
        return 1
    row_tiles = -(-max_rows // ROW_TILE)
    device = workspace.partial_out.device
    splits = decode_splits(num_reqs, num_kv_heads * row_tiles, max_keys=max_keys, device=device)
    has_counters = num_reqs * num_kv_heads * row_tiles <= workspace.finished.numel()
    affordable = workspace.partial_lse.shape[0] // tokens if has_counters else 1
    return max(1, min(splits, affordable))


def most_keys(page_table: Tensor, k_cache: Tensor, window: int | None) -> int:
    """No query of a single token sees more keys, however long its request becomes."""
    reach = page_table.shape[1] * k_cache.shape[1]
    return reach if window is None else min(window, reach)


def split_workspace(
    max_reqs: int, num_heads: int, num_kv_heads: int, *, v_head_dim: int, device: torch.device
) -> SplitWorkspace:
    """Buffers for any decode of up to `max_reqs` requests, and an extend of few rows.

    Few requests have many splits and many have few.
    """
    decode_rows = max(
        num_reqs * decode_splits(num_reqs, num_kv_heads, device=device)
        for num_reqs in range(1, max_reqs + 1)
    )
    rows = max(decode_rows, _extend_rows(num_heads, _num_sms(device)))
    shape = (rows, num_heads, v_head_dim)
    return SplitWorkspace(
        partial_out=torch.empty(shape, dtype=torch.float32, device=device),
        partial_lse=torch.empty(shape[:2], dtype=torch.float32, device=device),
        finished=torch.zeros((max_reqs, num_heads), dtype=torch.int32, device=device),
    )


def split_workspace_bytes(
    max_reqs: int, num_heads: int, num_kv_heads: int, *, v_head_dim: int
) -> int:
    """The most bytes `split_workspace` allocates, on any device.

    Splits beyond one share the device's programs; with one each, requests have a row each.
    """
    decode_rows = max(max_reqs, _PROGRAMS_PER_SM * MOST_SMS // num_kv_heads)
    rows = max(decode_rows, _extend_rows(num_heads, MOST_SMS))
    return 4 * num_heads * (rows * (v_head_dim + 1) + max_reqs)


def _extend_rows(num_heads: int, num_sms: int) -> int:
    """tokens * splits of an extend that splits: each program has ROW_TILE of tokens * heads."""
    return _PROGRAMS_PER_SM * num_sms * ROW_TILE // num_heads


def check_workspace(
    workspace: SplitWorkspace, rows: int, counters: int, num_heads: int, v_head_dim: int
) -> None:
    """Contiguous, of the right dtypes, and large enough for `rows` partial results."""
    wanted = (
        ("partial_out", workspace.partial_out, torch.float32, rows * num_heads * v_head_dim),
        ("partial_lse", workspace.partial_lse, torch.float32, rows * num_heads),
        ("finished", workspace.finished, torch.int32, counters * num_heads),
    )
    for name, tensor, dtype, elements in wanted:
        if tensor.dtype != dtype or tensor.numel() < elements or not tensor.is_contiguous():
            reject(
                f"workspace.{name}",
                expected=f"contiguous {dtype} with at least {elements} elements",
                got=tensor,
                remedy="allocate it with split_workspace for the largest number of requests",
            )


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
