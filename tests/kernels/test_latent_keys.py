"""paged_extend over latents, V the leading columns of K: every tile table, interpreted, against the
definition; dead keys are NaN."""

import pytest
import torch

from paceline.core.errors import KernelArgumentError
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    SplitWorkspace,
    Weighing,
    paged_extend,
)
from paceline.kernels.scaled_latents import CODE, ScaledLatents, quantise_latents
from paceline.proof.rig.paged import errors, permuted_pages

pytest.importorskip("triton")

RANK, ROPE = 64, 16
IN_PARTS = 256  # a rank of several tiles of columns, in float8 too
ROOMY = 227 << 10  # bytes of shared memory
LOG2_E = 1.4426950408889634
CPU = torch.device("cpu")


def latent_call(
    heads: int,
    prefix_lens: list[int],
    extend: int,
    mask: MaskKind,
    *,
    rank: int = RANK,
    scaled: bool = False,
    page_size: int = 16,
) -> PagedCall:
    """Requests with `extend` tokens behind each prefix; of a tree the second half are siblings.

    scaled: rows of many magnitudes, in float8.
    """
    lens = [prefix + extend for prefix in prefix_lens]
    generator = torch.Generator().manual_seed(7)
    table, num_pages = permuted_pages(lens, page_size, generator, spare=1)
    rows = torch.randn(num_pages, page_size, 1, rank + ROPE, generator=generator).bfloat16()
    for request, length in enumerate(lens):
        if length % page_size:
            rows[table[request, length // page_size], length % page_size :] = float("nan")
    cache = PagedCache(rows, rows[..., :rank])
    if scaled:
        rows[..., :rank] *= torch.exp2(torch.arange(num_pages * page_size) % 7 - 3.0).view(
            -1, page_size, 1, 1
        )
        codes, scales = quantise_latents(rows[..., :rank])
        cache = PagedCache(codes, codes, beside=ScaledLatents(rows[..., rank:].clone(), scales))
    tokens, tree = len(lens) * extend, None
    if mask is MaskKind.TREE:
        tree = torch.ones(extend, extend, dtype=torch.bool).tril()
        tree[extend // 2 :, extend // 2 :] = torch.eye(extend - extend // 2, dtype=torch.bool)
        tree = tree.repeat(len(lens), 1)
    return PagedCall(
        torch.randn(tokens, heads, rank + ROPE, generator=generator).bfloat16(),
        cache,
        PagedRows(
            table,
            torch.tensor(prefix_lens, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int32),
            torch.arange(len(lens) + 1, dtype=torch.int32) * extend,
            extend,
            tree,
            mask,
        ),
        Weighing(0.1),
        torch.full((tokens, heads, rank), float("nan"), dtype=torch.bfloat16),
        torch.full((tokens, heads), float("nan")),
    )


def nan_workspace(call: PagedCall, splits: int) -> SplitWorkspace:
    tokens, heads, rank = call.out.shape
    return SplitWorkspace(
        partial_out=torch.full((tokens * splits, heads, rank), float("nan")),
        partial_lse=torch.full((tokens * splits, heads), float("nan")),
        finished=torch.zeros((tokens, heads), dtype=torch.int32),
    )


STEPS = {
    "one": (1, MaskKind.CAUSAL),
    "chain": (5, MaskKind.CAUSAL),
    "tree": (6, MaskKind.TREE),
}
TILES = {"few": (16, 1), "many": (16, 64), "pairs": (16, 1000), "wide": (64, 1)}  # rows, programs
SPLITS = (1, 3, 20)  # of 20 most have no keys, and not all fit one load


@pytest.mark.parametrize(
    ("step", "tile", "splits"),
    [
        pytest.param(
            *(step, tile, splits),
            marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow,  # a third holds every pair
        )
        for i, step in enumerate(STEPS)
        for j, tile in enumerate(TILES)
        for k, splits in enumerate(SPLITS)
    ],
)
def test_each_tile_table_meets_the_definition(step: str, tile: str, splits: int) -> None:
    from paceline.kernels._triton.paged_extend import latent_config, launch_paged_extend

    (extend, mask), (rows, programs) = STEPS[step], TILES[tile]
    heads = rows + 6 if extend == 1 else rows // 4  # two tiles of rows, one with room
    rank = {"pairs": IN_PARTS, "many": 96}.get(tile, RANK)
    call = latent_call(heads, [200, 0, 63], extend, mask, rank=rank)
    workspace = nan_workspace(call, splits) if splits > 1 else None
    launch_paged_extend(
        call,
        workspace,
        splits=splits,
        config=latent_config(rows, programs, is_scaled=False, shared_bytes=ROOMY),
    )
    found = errors(call.out, call.q, call.cache, call.rows, call.weighing)
    assert float(found.max()) <= 1.0


@pytest.mark.parametrize(
    ("rows", "programs", "splits", "extend", "mask", "page_size"),
    [
        (16, 1, 1, 6, MaskKind.TREE, 128),
        (16, 1000, 3, 1, MaskKind.CAUSAL, 16),
        (16, 1000, 3, 1, MaskKind.CAUSAL, 64),
        (64, 1, 1, 5, MaskKind.CAUSAL, 16),
        (64, 1, 3, 1, MaskKind.CAUSAL, 64),
    ],
    ids=["few-tree-in-pages", "pairs", "pairs-in-pages", "wide", "wide-splits"],
)
def test_scaled_latents_meet_the_definition(
    rows: int, programs: int, splits: int, extend: int, mask: MaskKind, page_size: int
) -> None:
    from paceline.kernels._triton.paged_extend import latent_config, launch_paged_extend

    heads = rows + 6 if extend == 1 else rows // 4
    rank = IN_PARTS if programs > 1 and page_size == 64 else RANK
    call = latent_call(
        heads, [200, 0, 63], extend, mask, rank=rank, scaled=True, page_size=page_size
    )
    if rank == IN_PARTS:  # the unit of a query is that of all its tiles of columns
        call.q[:, ::2, : rank // 2] = 0.0
    workspace = nan_workspace(call, splits) if splits > 1 else None
    launch_paged_extend(
        call,
        workspace,
        splits=splits,
        config=latent_config(rows, programs, is_scaled=True, shared_bytes=ROOMY),
    )
    found = errors(call.out, call.q, call.cache, call.rows, call.weighing)
    assert float(found.max()) <= 1.0


@pytest.mark.parametrize("rows", [16, 64], ids=["few", "wide"])
@pytest.mark.parametrize("growth", [2, 12, -12])
def test_sums_of_scaled_latents_follow_scores_from_tile_to_tile(growth: int, rows: int) -> None:
    """growth: of scores, in doublings of weights from one tile of 64 keys to the next: less than
    what sums of few rows bear as they are, more, and less than nothing."""
    from paceline.kernels._triton.paged_extend import latent_config, launch_paged_extend

    length = 4 * 64 - 6
    call = latent_call(rows, [length - 1], 1, MaskKind.CAUSAL)
    call.q[..., :RANK] = 0.25
    of_one = RANK * 0.25 * call.weighing.scale * LOG2_E  # doublings by 1 in each column
    at = torch.arange(length)
    slots = call.rows.page_table[0, at // 16].long() * 16 + at % 16
    latents = torch.zeros(call.cache.k.shape[0] * 16, RANK)
    latents[slots] = torch.randn(length, RANK, generator=torch.Generator().manual_seed(3)) * 0.2
    latents[slots] += (growth * (at // 64 - (growth < 0) * 3) / of_one)[:, None]
    codes, scales = quantise_latents(latents.view(-1, 16, 1, RANK))
    beside = ScaledLatents(call.cache.k[..., RANK:].clone(), scales)
    call = call._replace(cache=PagedCache(codes, codes, beside=beside))
    launch_paged_extend(
        call,
        None,
        splits=1,
        config=latent_config(rows, 1, is_scaled=True, shared_bytes=ROOMY),
    )
    found = errors(call.out, call.q, call.cache, call.rows, call.weighing)
    assert float(found.max()) <= 1.0


@pytest.mark.parametrize("rows", [16, 64], ids=["few", "wide"])
def test_scores_of_scaled_latents_are_capped_before_their_rows_scales_count(rows: int) -> None:
    from paceline.kernels._triton.paged_extend import latent_config, launch_paged_extend

    call = latent_call(rows, [90], 1, MaskKind.CAUSAL, scaled=True)
    call = call._replace(weighing=Weighing(0.1, soft_cap=0.5))
    config = latent_config(rows, 1, is_scaled=True, shared_bytes=ROOMY)
    launch_paged_extend(call, None, splits=1, config=config)
    found = errors(call.out, call.q, call.cache, call.rows, call.weighing)
    assert float(found.max()) <= 1.0


def test_float8_keys_that_hold_values_have_scales_of_rows() -> None:
    call = latent_call(16, [40], 1, MaskKind.CAUSAL)
    codes, one = torch.zeros(call.cache.k.shape, dtype=CODE), torch.ones(1)
    v = codes[..., :RANK]
    with pytest.raises(KernelArgumentError, match=r"v_cache must be pages of its own.*of rows"):
        paged_extend(call._replace(cache=PagedCache(codes, v, one, one)))
    paged_extend(call._replace(cache=PagedCache(codes, v.clone(), one, one)))
    assert not call.out.any()


def test_many_programs_of_few_rows_have_a_neighbour_with_fewer_keys() -> None:
    """Two of them, queries and three tiles each, fit the 227 KiB of a multiprocessor."""
    from paceline.kernels._triton.paged_extend import latent_config

    few, many, wide = (
        latent_config(rows, programs, is_scaled=False, shared_bytes=ROOMY)
        for rows, programs in ((16, 64), (16, 65), (64, 1000))
    )
    assert (few.block_keys, many.block_keys, wide.block_keys) == (64, 32, 64)
    tiles, queries = many.num_stages - 1, many.block_rows
    assert 2 * 576 * 2 * (tiles * many.block_keys + queries) < ROOMY


def test_codes_are_on_their_way_while_others_are_read_where_there_is_room() -> None:
    """Two programs with two tiles each fit an H200; smaller GPUs have one tile at a time."""
    from paceline.kernels._triton.paged_extend import latent_config

    roomy, small = (
        latent_config(16, 65, is_scaled=True, shared_bytes=each) for each in (ROOMY, 99 << 10)
    )
    assert (roomy.block_keys, roomy.num_warps, roomy.num_stages, small.num_stages) == (64, 4, 3, 2)
    tile, queries = roomy.block_keys * (512 + 4 + 128), 16 * 576 * 2
    assert 2 * ((roomy.num_stages - 1) * tile + queries) < ROOMY
