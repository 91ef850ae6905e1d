"""How many programs share a request's keys: the host's rules, on an H200's 132 multiprocessors."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from paceline.kernels.paged_attention import SplitWorkspace, decode_splits, split_workspace, splits
from paceline.kernels.paged_attention.splits import (
    extend_splits,
    row_tile,
    short_places,
    short_splits,
)

SMS, MAX_REQS, HEADS, KV_HEADS = 132, 64, 32, 8
GROUP = HEADS // KV_HEADS
META = torch.device("meta")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "multiprocessors", lambda device: SMS)


@pytest.fixture
def workspace() -> SplitWorkspace:
    return split_workspace(MAX_REQS, [(HEADS, KV_HEADS)], v_head_dim=128, device=META)


def extends() -> Iterator[tuple[int, int, torch.dtype]]:
    """(requests, tokens of each, dtype)"""
    for num_reqs in (1, 2, 3, 4, 8, 16, 64):
        for extend in (*range(1, 20), 31, 32, 33, 64):
            for dtype in (BF16, torch.float32):
                yield num_reqs, extend, dtype


def asked(
    workspace: SplitWorkspace,
    num_reqs: int,
    extend: int,
    *,
    dtype: torch.dtype = BF16,
    max_keys: int = 1 << 17,
) -> int:
    return extend_splits(
        num_reqs * extend,
        num_reqs,
        KV_HEADS,
        group=GROUP,
        max_rows=extend * GROUP,
        max_keys=max_keys,
        dtype=dtype,
        workspace=workspace,
    )


def test_a_workspace_holds_every_split_that_its_requests_may_use(workspace: SplitWorkspace) -> None:
    """Were it too small, fewer splits than two programs per multiprocessor would be used."""
    for num_reqs, extend, dtype in extends():
        tiles = -(-extend * GROUP // row_tile(num_reqs, KV_HEADS, extend * GROUP, dtype=dtype))
        wanted = max(1, 2 * SMS // (num_reqs * KV_HEADS * tiles))
        found = asked(workspace, num_reqs, extend, dtype=dtype)
        assert found == min(64, wanted), (num_reqs, extend, dtype)
        if found > 1:
            assert num_reqs * extend * found <= workspace.partial_lse.shape[0]
            assert num_reqs * KV_HEADS * tiles <= workspace.finished.numel()
    for num_reqs in range(1, MAX_REQS + 1):
        used = num_reqs * decode_splits(num_reqs, KV_HEADS, device=META)
        assert used <= workspace.partial_lse.shape[0]


def test_short_requests_have_four_programs_per_processor_beside_longer_ones(
    workspace: SplitWorkspace,
) -> None:
    def found(num_reqs: int, *, group: int = GROUP, max_keys: int = 1 << 17) -> int:
        return short_splits(num_reqs, group, KV_HEADS, max_keys=max_keys, workspace=workspace)

    assert [found(n) for n in (2, 8, 16, 17, 33, 34, 64)] == [33, 8, 4, 3, 2, 1, 1]
    assert found(1, max_keys=129) == 3
    for num_reqs in range(1, MAX_REQS + 1):
        for group in (1, 3, 4, 16):
            shares = found(num_reqs, group=group)
            places = short_places(num_reqs, group)
            assert shares == 1 or places * shares <= workspace.partial_lse.shape[0]
    without = replace(workspace, finished=workspace.finished[:1, :15])
    assert short_splits(2, GROUP, KV_HEADS, max_keys=1 << 17, workspace=without) == 1


def test_requests_of_few_tokens_take_no_tiles_from_a_longer_one(workspace: SplitWorkspace) -> None:
    """Seven decodes and 56 tokens: 15 tiles of 32 rows at most, not eight times seven."""

    def found(tokens: int, num_reqs: int) -> int:
        return extend_splits(
            tokens,
            num_reqs,
            KV_HEADS,
            group=GROUP,
            max_rows=56 * GROUP,
            max_keys=1 << 17,
            dtype=BF16,
            workspace=workspace,
        )

    assert found(7 + 56, 8) == 2 * SMS // (15 * KV_HEADS) == 2
    assert found(56, 1) == 2 * SMS // (7 * KV_HEADS) == 4
    assert found(8 * 56, 8) == 1


def test_a_decode_of_several_requests_holds_more_programs_than_two_per_processor() -> None:
    found = {n: decode_splits(n, KV_HEADS, device=META) for n in (1, 2, 4, 8, 16, 32, 64)}
    assert found == {1: 33, 2: 16, 4: 16, 8: 8, 16: 4, 32: 1, 64: 1}


def test_a_request_is_not_split_finer_than_its_keys_are_worth(workspace: SplitWorkspace) -> None:
    assert decode_splits(1, KV_HEADS, max_keys=1, device=META) == 1
    assert decode_splits(1, KV_HEADS, max_keys=129, device=META) == 3
    assert asked(workspace, 1, 4, max_keys=129) == 3


def test_many_rows_are_not_split(workspace: SplitWorkspace) -> None:
    assert asked(workspace, 1, 64) > 1
    assert asked(workspace, 1, 65) == 1


@pytest.mark.parametrize(
    ("num_reqs", "extend", "rows"), [(1, 4, 16), (64, 4, 16), (1, 8, 16), (4, 8, 16), (8, 8, 32)]
)
def test_rows_are_spread_while_processors_idle(num_reqs: int, extend: int, rows: int) -> None:
    assert row_tile(num_reqs, KV_HEADS, extend * GROUP, dtype=BF16) == rows
    assert row_tile(num_reqs, KV_HEADS, extend * GROUP, dtype=torch.float32) == 16


@pytest.mark.parametrize(
    ("num_reqs", "heads", "wanted", "scaled"),
    [
        (1, 16, 64, 64),
        (16, 16, 8, 16),
        (64, 16, 2, 4),
        (65, 16, 4, 4),
        (64, 40, 1, 1),
        (64, 128, 1, 1),
        (8, 128, 2, 4),
    ],
)
def test_latents_have_a_program_for_each_multiprocessor_or_two(
    num_reqs: int, heads: int, wanted: int, scaled: int
) -> None:
    """Two where programs of 16 rows are many; 64 requests of 40 heads have 192 of them.  In float8
    fewer are many."""
    workspace = split_workspace(64, [(heads, 1)], v_head_dim=512, device=META)
    found = [
        extend_splits(
            num_reqs,
            num_reqs,
            1,
            group=heads,
            max_rows=heads,
            max_keys=1 << 17,
            dtype=BF16,
            workspace=workspace,
            is_wide=True,
            is_scaled=is_scaled,
        )
        for is_scaled in (False, True)
    ]
    assert found == [wanted, scaled]
