"""Launches of the attention kernels on paged cases, and their comparison with the definition."""

import math
from collections.abc import Sequence

import torch
from paged_cases import BatchSpec, PagedCase, first_key_dropped, reference, worst_error
from torch import Tensor

from paceline.kernels.paged_attention import (
    PagedCall,
    SplitWorkspace,
    paged_decode,
    paged_extend,
    split_workspace,
)

CPU = torch.device("cpu")
DECODE = BatchSpec(prefix_lens=(96, 0, 42), extend_lens=(1, 1, 1))
RAGGED = BatchSpec(prefix_lens=(45, 0, 17), extend_lens=(3, 21, 1))


def workspace_of(case: PagedCase, max_reqs: int) -> SplitWorkspace:
    """Full of NaN, but for the counters."""
    shape = case.shape
    workspace = split_workspace(
        max_reqs,
        [(shape.num_heads, shape.num_kv_heads)],
        v_head_dim=shape.v_head_dim,
        device=case.q.device,
    )
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    return workspace


def run_decode(case: PagedCase, kv_lens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    call, workspace = case.call(), workspace_of(case, case.q.shape[0])
    if kv_lens is not None:
        call = call._replace(rows=call.rows._replace(kv_lens=kv_lens))
    paged_decode(call, workspace)
    assert not workspace.finished.any()
    return outputs_of(call)


def run_extend(
    case: PagedCase, *, prefix_only: bool = False, workspace: SplitWorkspace | None = None
) -> tuple[Tensor, Tensor]:
    call = case.call(prefix_only=prefix_only)
    paged_extend(call, workspace)
    return outputs_of(call)


def outputs_of(call: PagedCall) -> tuple[Tensor, Tensor]:
    assert call.lse is not None
    return call.out, call.lse


def assert_matches(
    case: PagedCase, actual: tuple[Tensor, Tensor], *, prefix_only: bool = False
) -> None:
    out, lse = actual
    assert worst_error(case, out, prefix_only=prefix_only) <= 1.0
    _, expected_lse = reference(case, prefix_only=prefix_only)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    wrong = first_key_dropped(case, prefix_only=prefix_only)
    assert worst_error(case, wrong, prefix_only=prefix_only) > 1.0


def splits_by_length(tiles: Sequence[int], shares: int, min_tiles: int) -> list[int]:
    """The splits of requests with so many tiles of keys: none has more than one and a half of
    `shares` equal ones of all; where none has two, and the mean as much but for a tile, each has
    one split."""
    most = max(min_tiles, math.ceil(1.5 * sum(tiles) / shares))
    if max(tiles) * shares < 2 * sum(tiles) and len(tiles) * (most - 1) < sum(tiles):
        most = max(tiles)
    return [max(1, math.ceil(count / most)) for count in tiles]


def assert_merged(partial_lse: Tensor, firsts: Sequence[int], live: Sequence[int]) -> None:
    """Partial results of several splits, and no others, were left.

    partial_lse: [slots, heads], NaN before; firsts, live: of each request its first slot and how
    many splits it has.
    """
    left = {
        first + index
        for first, count in zip(firsts, live, strict=True)
        for index in range(count if count > 1 else 0)
    }
    assert set(partial_lse.isfinite().all(-1).nonzero()[:, 0].tolist()) == left
