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


def most_slots(num_reqs: int, turn: int) -> int:
    """As few turns as hold the requests, and one more of at most one split for each."""
    return math.ceil(num_reqs / turn) * turn + min(num_reqs, turn)


def slots_by_length(
    tiles: Sequence[int], turn: int, slots: int, min_tiles: int
) -> tuple[list[int], list[int]]:
    """(the first slot, how many) of the splits of requests with so many tiles of keys: in as few
    turns as hold those of more than one, and one more where a split of these had more than two
    equal shares.  Splits that are fuller, by fifths, have slots before others.  One each, in order,
    where nobody is worth two, or has two shares of a turn, or halves are too many.
    """

    def splits_of(most: int) -> list[int]:
        return [max(1, math.ceil(count / most)) for count in tiles]

    total, longest, live = sum(tiles), max(tiles), sum(count > 1 for count in tiles)
    short = len(tiles) - live
    turns = math.ceil(max(live, 1) / turn) * turn
    most = max(2 * total // turns, min_tiles)
    room = turns - (total - short - live * (longest - 2))
    if longest < 2 * min_tiles or (longest < most and (live <= turn or room < 0)):
        return list(range(len(tiles))), [1] * len(tiles)
    if sum(splits_of(most)) > turns + short:
        turns = min(turns + min(live, turn), slots - short)
        most = max(min_tiles, math.ceil(total / (turns - live)))
    most = min(most, longest)
    least = max(math.ceil(total / turns), min_tiles)
    while most - least > least // 8:
        middle = (least + most) // 2
        if sum(splits_of(middle)) <= turns + short:
            most = middle
        else:
            least = middle + 1
    splits = splits_of(most)
    lacks = [min(3, 5 - math.ceil(5 * n / (most * s))) for n, s in zip(tiles, splits, strict=True)]
    order = sorted(range(len(tiles)), key=lambda req: lacks[req])
    firsts = {req: sum(splits[each] for each in order[:at]) for at, req in enumerate(order)}
    return [firsts[req] for req in range(len(tiles))], splits


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
