"""What requests of a decode share, and attention that reads it once, against the definitions."""

import random
from dataclasses import replace

import pytest
import torch
from paged_cases import BatchSpec, PagedCase, Shape, make_case
from paged_runs import (
    CPU,
    assert_matches,
    assert_merged,
    most_slots,
    outputs_of,
    slots_by_length,
)
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.paged_attention import (
    SplitWorkspace,
    find_shared,
    shared_prefixes,
    sharing_rule,
    split_workspace,
)
from paceline.kernels.paged_attention.shared_prefix import (
    SharedPrefixes,
    SharingRule,
    find_shared_reference,
)

RULE = SharingRule(min_pages=2, min_reqs=3, tile_reqs=4)


def found(
    page_table: Tensor, kv_lens: Tensor, rule: SharingRule, *, page_size: int
) -> SharedPrefixes:
    into = shared_prefixes(len(kv_lens), CPU)
    for column in (into.shared_lens, into.places, into.leaders, into.common, into.held):
        column.fill_(-77)
    find_shared(page_table, kv_lens, into, rule, page_size=page_size)
    return into


def test_the_example_of_the_definition() -> None:
    table = torch.tensor(
        [[5, 6, 7, 9], [5, 6, 3, 0], [8, 2, 1, 0], [5, 6, 7, 4]], dtype=torch.int32
    )
    lens = torch.tensor([60, 40, 33, 50], dtype=torch.int32)
    rule = SharingRule(min_pages=2, min_reqs=2, tile_reqs=4)
    shared, places = find_shared_reference(table, lens, rule, page_size=16)
    assert shared.tolist() == [32, 32, 0, 32]
    assert places.tolist() == [0, 1, -1, 2]


def test_the_page_of_the_own_token_is_not_shared() -> None:
    """Equal tables to the end: page 1 holds the token that each of them is writing."""
    table = torch.tensor([[5, 6, 7]] * 3, dtype=torch.int32)
    for length, shared in ((32, 0), (33, 32), (48, 32), (49, 48)):
        lens = torch.full((3,), length, dtype=torch.int32)
        assert found(table, lens, RULE, page_size=16).shared_lens.tolist() == [shared] * 3


def test_one_that_shares_little_leaves_the_group_its_length() -> None:
    table = torch.tensor([[1, 2, 3, 4, 5, 9 + row] for row in range(5)], dtype=torch.int32)
    table[3, 2:] = torch.tensor([20, 21, 22, 23])
    lens = torch.full((5,), 24, dtype=torch.int32)
    shared = found(table, lens, RULE, page_size=4)
    assert shared.shared_lens.tolist() == [20, 20, 20, 0, 20]
    assert shared.places.tolist() == [0, 1, 2, -1, 3]


@pytest.mark.parametrize("seed", range(12))
def test_random_tables_match_the_definition(seed: int) -> None:
    """Several prompts, cut at random places, short rows, more requests than a loop compares."""
    rng = random.Random(seed)
    reqs, page_size, width = rng.choice((1, 5, 9, 33, 70)), rng.choice((1, 4)), 6
    numbers = iter(range(1, 10_000))
    prompts = [[next(numbers) for _ in range(width)] for _ in range(rng.choice((1, 3)))]
    table, lens = torch.zeros(reqs, width, dtype=torch.int32), torch.full((reqs,), 2)
    for row in range(reqs):
        if rng.random() < 0.1:
            continue  # padded: page 0 and two keys
        lens[row] = rng.randint(1, width * page_size)
        cut, pages = rng.choice((0, 2, 3, width, width)), -(-int(lens[row]) // page_size)
        prompt = rng.choice(prompts)
        held = [prompt[i] if i < cut else next(numbers) for i in range(pages)]
        table[row, :pages] = torch.tensor(held, dtype=torch.int32)
    rule = SharingRule(rng.choice((1, 2, 3)), rng.choice((2, 3)), rng.choice((1, 2, 4)))
    lens = lens.int()
    shared, places = find_shared_reference(table, lens, rule, page_size=page_size)
    got = found(table, lens, rule, page_size=page_size)
    assert torch.equal(got.shared_lens, shared)
    assert torch.equal(got.places, places)
    assert int(places.max()) < rule.tiles(reqs) * rule.tile_reqs


def test_the_rule_asks_for_whole_pages_of_512_keys() -> None:
    assert sharing_rule(4, 16) == SharingRule(min_pages=32, min_reqs=8, tile_reqs=16)
    assert sharing_rule(7, 1) == SharingRule(min_pages=512, min_reqs=8, tile_reqs=8)
    assert sharing_rule(128, 64) == SharingRule(min_pages=8, min_reqs=8, tile_reqs=1)


SHAPES = {
    "gqa2-80-96": Shape(num_heads=4, num_kv_heads=2, head_dim=80, v_head_dim=96),
    "gqa3-64-bf16-capped": Shape(num_heads=3, dtype=torch.bfloat16, soft_cap=3.0, sinks=True),
    "mha-64-fp8-page4": Shape(
        num_kv_heads=2,
        page_size=4,
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
    ),
}
# Two groups of 5 and 3, one request that shares nothing and one of the first key alone.
LENS = (130, 97, 96, 120, 101, 70, 64, 80, 50, 0)
GROUPS = ((4, 0, 1, 2, 3), (5, 6, 7))


def shared_case(name: str) -> PagedCase:
    shape = SHAPES[name]
    batch = BatchSpec(prefix_lens=LENS, extend_lens=(1,) * len(LENS))
    case = make_case(batch, shape, seed=21)
    table = case.page_table.clone()
    for (leader, *others), keys in zip(GROUPS, (96, 64), strict=True):
        pages = keys // shape.page_size
        table[others, :pages] = table[leader, :pages]
    return replace(case, page_table=table)


def run_shared(
    case: PagedCase, *, chunks: int, turn: int, tables: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Decode in tiles of 16 keys with what RULE finds, in `tables` where these are others than the
    case's, over a workspace full of NaN."""
    from paceline.kernels._triton.paged_decode import launch_paged_decode
    from paceline.kernels._triton.runtime import SplitConfig
    from paceline.kernels._triton.shared_prefix import launch_shared

    shape, (reqs, heads, _) = case.shape, case.q.shape
    rule = RULE._replace(min_pages=64 // shape.page_size)
    tables = case.page_table if tables is None else tables
    shared = found(tables, case.kv_lens, rule, page_size=shape.page_size)
    assert shared.shared_lens.tolist() == [96] * 5 + [64] * 3 + [0, 0]
    slots = most_slots(reqs, turn)
    rows = slots + reqs * chunks
    workspace = SplitWorkspace(
        partial_out=torch.full((rows, heads, shape.v_head_dim), float("nan")),
        partial_lse=torch.full((rows, heads), float("nan")),
        finished=torch.zeros(reqs, heads, dtype=torch.int32),
    )
    call = case.call()
    launch_shared(
        call,
        workspace,
        shared.shared_lens,
        shared.places,
        rule,
        first_partial=slots,
        chunks=chunks,
    )
    config = SplitConfig(block_rows=16, block_keys=16, num_warps=4, num_stages=2, min_tiles=1)
    launch_paged_decode(
        call,
        workspace,
        splits=slots,
        turn=turn,
        shared_lens=shared.shared_lens,
        chunks=chunks,
        config=config,
    )
    assert not workspace.finished.any()
    tiles = [-(-own // 16) for own in (case.kv_lens - shared.shared_lens).tolist()]
    firsts, live = slots_by_length(tiles, turn, slots, 1)
    assert_merged(workspace.partial_lse[:slots], firsts, live)
    return outputs_of(call)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("chunks", "turn"), [(1, 10), (2, 40), (8, 6)])
def test_decode_of_shared_prefixes_matches_reference(name: str, chunks: int, turn: int) -> None:
    case = shared_case(name)
    assert_matches(case, run_shared(case, chunks=chunks, turn=turn))


@pytest.mark.parametrize("turn", [20, 6], ids=["in splits", "one split each"])
def test_what_is_shared_is_read_once(turn: int) -> None:
    """A tile reads by the table of its last request: those of the others are not looked at."""
    case = shared_case("gqa2-80-96")
    table = case.page_table.clone()
    table[[0, 1, 2], : 96 // 16] = 0  # a page of NaN
    blinded = replace(case, page_table=table)
    plain, actual = (
        run_shared(each, chunks=1, turn=turn, tables=case.page_table)[0] for each in (case, blinded)
    )
    assert torch.equal(plain, actual)


def test_the_workspace_holds_the_chunks_of_every_number_of_requests() -> None:
    plain = split_workspace(256, [(32, 8)], v_head_dim=128, device=torch.device("meta"))
    shared = split_workspace(
        256, [(32, 8)], v_head_dim=128, device=torch.device("meta"), shares_prefixes=True
    )
    assert shared.partial_lse.shape[0] > plain.partial_lse.shape[0]


def test_columns_of_another_length_are_refused() -> None:
    table, lens = torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="shared_lens"):
        find_shared(table, lens, shared_prefixes(4, CPU), RULE, page_size=4)
