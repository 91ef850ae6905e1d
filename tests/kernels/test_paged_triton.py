"""The Triton attention kernels, interpreted on the CPU, against the paged definition."""

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from paged_cases import BatchSpec, PagedCase, Shape, make_case
from paged_runs import (
    CPU,
    DECODE,
    RAGGED,
    assert_matches,
    assert_merged,
    most_slots,
    outputs_of,
    run_decode,
    run_extend,
    slots_by_length,
    workspace_of,
)
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.model.lookback import Chunk, first_visible
from paceline.kernels._triton import paged_decode as paged_decode_kernel
from paceline.kernels._triton import paged_extend as kernels
from paceline.kernels.paged_attention import (
    PagedCall,
    SplitWorkspace,
    decode_splits,
    paged_decode,
    paged_extend,
    split_workspace,
    splits,
)
from paceline.kernels.paged_attention.splits import (
    SHORT_ROWS,
    decode_slots,
    takes_one_warp,
)

SHAPES = {
    "mha-64-page1": Shape(num_kv_heads=2, page_size=1),
    "gqa2-80-96-page16": Shape(num_heads=4, num_kv_heads=2, head_dim=80, v_head_dim=96),
    "gqa4-128-bf16": Shape(num_heads=4, head_dim=128, v_head_dim=128, dtype=torch.bfloat16),
    "gqa7-64-fp16": Shape(num_heads=7, dtype=torch.float16),
    "gqa8-96-64-page64": Shape(num_heads=8, head_dim=96, page_size=64, window=70),
    "mqa20-64": Shape(num_heads=20, window=1),
    "256-capped": Shape(num_heads=1, head_dim=256, v_head_dim=256, soft_cap=2.0),
    "window-below-page": Shape(window=9),
    "window-at-page": Shape(window=16),
    "window-above-page-capped": Shape(window=37, soft_cap=5.0),
    "chunk-over-a-tile": Shape(window=Chunk(46)),  # of 32 keys, which none of the last rows sees
    "chunk-of-tiles": Shape(window=Chunk(90), soft_cap=5.0),  # which every row sees
}

MORE_SHAPES = {
    **SHAPES,
    "gqa2-64-fp8-sinks": Shape(kv_dtype=torch.float8_e4m3fn, sinks=True),
    "chunk-of-splits": Shape(window=Chunk(300)),
    "window-of-splits": Shape(window=300),
}


@pytest.mark.parametrize("name", SHAPES)
def test_decode_matches_reference_and_not_a_dropped_key(name: str) -> None:
    case = make_case(DECODE, SHAPES[name], seed=11)
    assert_matches(case, run_decode(case))


@pytest.mark.parametrize("name", SHAPES)
def test_extend_matches_reference_and_not_a_dropped_key(name: str) -> None:
    case = make_case(RAGGED, SHAPES[name], seed=12)
    assert_matches(case, run_extend(case))


# Decodes, chunks, whole prompts and a request without rows; more requests than are counted at once.
TRAFFIC = BatchSpec(prefix_lens=(45, 0, 17, 50, 3, 8), extend_lens=(1, 37, 3, 1, 0, 9))
CROWD = BatchSpec(prefix_lens=(2,) * 130 + (5, 0), extend_lens=(1,) * 130 + (20, 9))


@pytest.mark.parametrize(
    ("batch", "name", "launches"),
    [
        (TRAFFIC, "gqa2-80-96-page16", 1),
        (TRAFFIC, "window-above-page-capped", 1),
        (TRAFFIC, "gqa2-80-96-page16", 2),
        (TRAFFIC, "gqa4-128-bf16", 2),
        (TRAFFIC, "mqa20-64", 2),
        (TRAFFIC, "window-above-page-capped", 2),
        (CROWD, "window-below-page", 2),
    ],
)
def test_short_and_long_requests_of_a_step_match_reference(
    monkeypatch: pytest.MonkeyPatch, batch: BatchSpec, name: str, launches: int
) -> None:
    started: list[set[str]] = []
    start = kernels._start

    def note(*args: object, **kwargs: object) -> None:
        started.append({name for name in ("leads", "follows") if kwargs.get(name)})
        start(*args, **kwargs)

    monkeypatch.setattr(kernels, "_start", note)
    if batch is TRAFFIC and launches == 2:
        monkeypatch.setattr(kernels, "_MANY_PROGRAMS", 1)
    case = make_case(batch, SHAPES[name], seed=17)
    assert_matches(case, run_extend(case))
    # Who follows does not wait for what its requests need: another launch of the call has.
    assert started == ([{"leads"}, {"follows"}] if launches == 2 else [set()])


def assert_rows_of_splits(
    case: PagedCase, workspace: SplitWorkspace, shares: int, *, most: int = 1 << 30
) -> None:
    """Each token of a request with at most `most` rows has a row for each head and split with keys:
    no two share one."""
    shape, batch = case.shape, case.batch
    config = kernels.extend_config(
        most, shape.head_dim, shape.v_head_dim, dtype=shape.dtype, kv_dtype=case.k_cache.dtype,
        shared_bytes=0, row_tile=16, is_split=True,
    )  # fmt: skip
    group, rows = shape.num_heads // shape.num_kv_heads, 0
    assert config.min_tiles * config.block_keys > 30 + group  # tiles of a request have as many
    for prefix, extend in zip(batch.prefix_lens, batch.extend_lens, strict=True):
        if 0 < extend * group <= most:
            begin = 0 if shape.window is None else first_visible(shape.window, prefix)
            tiles = -(-(prefix + extend - begin) // config.block_keys)
            live = max(1, min(shares, -(-tiles // config.min_tiles)))
            rows += extend * shape.num_heads * live
    assert (~workspace.partial_lse.isnan()).sum() == rows


# Few requests, of which the short ones have keys for several splits, before the prompt and behind.
FEW = BatchSpec(prefix_lens=(700, 0, 17, 650, 3, 0), extend_lens=(1, 131, 3, 1, 0, 9))


@pytest.mark.parametrize(
    "name",
    [
        "gqa2-80-96-page16",
        "gqa4-128-bf16",
        "gqa7-64-fp16",
        "mha-64-page1",
        "256-capped",
        "window-of-splits",
        "chunk-of-splits",
        "gqa2-64-fp8-sinks",
    ],
)
def test_short_requests_split_their_keys_beside_longer_ones(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    started: list[tuple[int, bool, bool]] = []
    start = kernels._start

    def note(*args: Any, **asked: Any) -> None:
        started.append((args[-1], asked.get("leads", False), asked.get("follows", False)))
        start(*args, **asked)

    monkeypatch.setattr(kernels, "_start", note)
    monkeypatch.setattr(splits, "_MOST_SPLIT_ROWS", 100)
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 24)
    case = make_case(FEW, MORE_SHAPES[name], seed=18)
    workspace = workspace_of(case, len(FEW.extend_lens))
    assert_matches(case, run_extend(case, workspace=workspace))
    (whole, leads, _), (shares, _, follows) = started
    assert leads
    assert follows
    assert whole == 1 < shares
    assert not workspace.finished.any()
    assert_rows_of_splits(case, workspace, shares, most=SHORT_ROWS)


@pytest.mark.parametrize(
    "name", ["gqa2-80-96-page16", "gqa4-128-bf16", "gqa7-64-fp16", "256-capped", "window-of-splits"]
)
def test_requests_of_unequal_lengths_split_their_keys_in_slots(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    grids: list[tuple[bool, int]] = []
    start = kernels._start

    def note(*args: Any, **asked: Any) -> None:
        grids.append((asked["in_slots"], args[-1]))
        start(*args, **asked)

    monkeypatch.setattr(kernels, "_start", note)
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    batch = BatchSpec(prefix_lens=(700, 0, 17, 650, 0), extend_lens=(1, 30, 3, 1, 0))
    case = make_case(batch, MORE_SHAPES[name], seed=19)
    workspace = workspace_of(case, 64)
    assert_matches(case, run_extend(case, workspace=workspace))
    ((in_slots, shares),) = grids
    assert in_slots
    assert shares > 2
    assert not workspace.finished.any()
    assert_rows_of_splits(case, workspace, shares)


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_every_tile_with_rows_has_a_slot(block: int, group: int) -> None:
    """By the definition in the kernel's head, over many lengths."""
    rng = random.Random(block * group)
    for _ in range(300):
        lens = [rng.choice((0, 1, 2, rng.randrange(300))) for _ in range(rng.randrange(1, 20))]
        begins = [0, *itertools.accumulate(lens)]
        slots = begins[-1] * group // block + len(lens)
        first = [begin * group // block + req for req, begin in enumerate(begins)]
        for req, length in enumerate(lens):
            assert -(-length * group // block) <= first[req + 1] - first[req], lens
        assert first[len(lens)] <= slots


@pytest.mark.parametrize("name", ["gqa2-80-96-page16", "window-above-page-capped"])
def test_prefix_only_leaves_out_the_step(name: str) -> None:
    case = make_case(RAGGED, SHAPES[name], seed=13)
    assert_matches(case, run_extend(case, prefix_only=True), prefix_only=True)


def test_rows_behind_their_window_are_zero_with_lse_minus_infinity() -> None:
    batch = BatchSpec(prefix_lens=(20,), extend_lens=(15,))
    case = make_case(batch, SHAPES["window-below-page"], seed=14)
    out, lse = run_extend(case, prefix_only=True)
    assert out[8:].eq(0).all()
    assert lse[8:].isneginf().all()
    assert lse[:8].isfinite().all()


def test_request_without_keys_gives_zeros() -> None:
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=15)
    out, lse = run_decode(case, kv_lens=torch.tensor([97, 0, 43], dtype=torch.int32))
    assert out[1].eq(0).all()
    assert lse[1].isneginf().all()
    assert out[0].isfinite().all()


def test_padded_rows_do_not_change_the_others() -> None:
    case = make_case(DECODE, SHAPES["window-at-page"], seed=16)
    lens = torch.tensor([97, 2, 43], dtype=torch.int32)  # the middle row reads page 0, all NaN
    table = case.page_table.clone()
    table[1] = 0
    padded = replace(case, page_table=table, kv_lens=lens)
    plain, with_padding = run_decode(case), run_decode(padded)
    for mine, other in zip(plain, with_padding, strict=True):
        assert torch.equal(mine[[0, 2]], other[[0, 2]])
        assert other[1].isnan().all()


def test_nan_keys_reach_the_output() -> None:
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=17)
    page = int(case.page_table[0, 30])
    case.k_cache[page, 0] = float("nan")
    out, lse = run_decode(case)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[2].isfinite().all()


def run_splits(
    case: PagedCase, splits: int, min_tiles: int, *, turn: int | None = None
) -> tuple[Tensor, Tensor]:
    """Decode in tiles of 16 keys, dealt to `splits`, each worth `min_tiles`; with `turn` by length,
    in turns of so many."""
    from paceline.kernels._triton.paged_decode import launch_paged_decode
    from paceline.kernels._triton.runtime import SplitConfig

    num_reqs, heads, _ = case.q.shape
    window = case.shape.window
    tiles = [
        math.ceil((length - first_visible(window, max(length - 1, 0))) / 16)
        for length in case.kv_lens.tolist()
    ]
    if turn is None:
        live = [min(splits, math.ceil(count / min_tiles)) for count in tiles]
        firsts = [splits * req for req in range(num_reqs)]
        rows = splits * num_reqs
    else:
        rows = splits = most_slots(num_reqs, turn)
        firsts, live = slots_by_length(tiles, turn, splits, min_tiles)
    call = case.call()
    partial_lse = torch.full((rows, heads), float("nan"))
    finished = torch.zeros(num_reqs, heads, dtype=torch.int32)
    workspace = SplitWorkspace(
        partial_out=torch.full((*partial_lse.shape, case.shape.v_head_dim), float("nan")),
        partial_lse=partial_lse,
        finished=finished,
    )
    config = SplitConfig(
        block_rows=16, block_keys=16, num_warps=4, num_stages=2, min_tiles=min_tiles
    )
    launch_paged_decode(call, workspace, splits=splits, turn=turn, config=config)
    assert not finished.any()
    assert_merged(partial_lse, firsts, live)
    return outputs_of(call)


@pytest.mark.parametrize(("splits", "min_tiles"), [(1, 1), (2, 1), (5, 2), (7, 1), (64, 1)])
def test_any_number_of_splits_gives_the_same(splits: int, min_tiles: int) -> None:
    """Short requests use fewer splits than were launched, and those that leave count for none."""
    shape = replace(SHAPES["gqa2-80-96-page16"], sinks=True)
    case = make_case(DECODE, shape, seed=18)
    assert_matches(case, run_splits(case, splits, min_tiles))


@cache
def case_without_splits(lens: tuple[int, ...]) -> tuple[PagedCase, tuple[Tensor, Tensor]]:
    """Requests of these lengths, and what one split makes of them."""
    batch = BatchSpec(
        prefix_lens=tuple(max(0, length - 1) for length in lens), extend_lens=(1,) * len(lens)
    )
    case = make_case(batch, replace(SHAPES["gqa2-80-96-page16"], sinks=True), seed=19)
    case = replace(case, kv_lens=torch.tensor(lens, dtype=torch.int32))
    return case, run_splits(case, 1, 1)


@pytest.mark.parametrize(
    ("turn", "min_tiles"),
    [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 3), (9, 1), (40, 1)],
)
@pytest.mark.parametrize(
    "lens",
    [
        (97, 1, 43),
        (1, 1, 1, 97),
        (97, 97, 0, 97, 97, 17),
        (43, 43, 17),
        (97, 97, 97, 97),
        (112, 112, 208),
        (112, 80, 96, 80),
        (16, 208, 48, 80, 112),
        (208, 32, 32),
        (208, 32, 5, 48, 32, 16),
        (0, 0, 0),
    ],
)
def test_splits_by_length_give_the_same(lens: tuple[int, ...], turn: int, min_tiles: int) -> None:
    assert_splits_change_nothing(lens, turn, min_tiles)


@pytest.mark.parametrize(
    ("tiles", "turn", "min_tiles"),
    [
        ((2,), 1, 1),
        ((2,), 2, 1),
        ((3, 0, 0), 3, 2),
        ((1, 1, 7, 1, 7, 8), 2, 3),
        ((12, 1, 6, 4, 1, 3, 2, 5), 3, 3),
        ((2, 2, 2, 0, 18, 16), 3, 1),
        ((2, 2, 2, 2, 5, 6, 2, 2), 1, 3),
        ((2, 8, 2, 2, 2, 2), 6, 4),
    ],
    ids=["alone", "half", "short", "just even", "fifths", "one turn more", "in ones", "worth it"],
)
def test_splits_at_the_ends_of_their_rule_give_the_same(
    tiles: tuple[int, ...], turn: int, min_tiles: int
) -> None:
    """Each of other slots by a rule that is a little off."""
    assert_splits_change_nothing(tuple(16 * count for count in tiles), turn, min_tiles)


def assert_splits_change_nothing(lens: tuple[int, ...], turn: int, min_tiles: int) -> None:
    case, (whole, whole_lse) = case_without_splits(lens)
    out, lse = run_splits(case, 0, min_tiles, turn=turn)
    live = torch.tensor(lens) > 0
    assert out[~live].eq(0).all()
    torch.testing.assert_close(out[live], whole[live], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[live], whole_lse[live], atol=1e-5, rtol=1e-5)
    if live.all():
        assert_matches(case, (out, lse))


def test_slots_of_nobody_look_up_pages_of_a_request_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the table's last row may be no memory: a program asks before it knows that it has
    nothing to do."""
    case, _ = case_without_splits((1, 1, 1, 97))
    rows: set[int] = set()
    look_up = paged_decode_kernel.lookup_pages

    def noted(page_row_ptr: Any, *rest: Any) -> Any:
        rows.add(int(page_row_ptr.handle.data.item()))
        return look_up(page_row_ptr, *rest)

    monkeypatch.setattr(paged_decode_kernel, "lookup_pages", noted)
    run_splits(case, 0, 1, turn=20)
    row_bytes = case.page_table.stride(0) * case.page_table.element_size()
    assert sorted(rows) == [min(rows) + row_bytes * req for req in range(4)]


def test_many_programs_are_of_one_warp_each_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """9 requests of 2 heads, which count as 16: more than 16 programs for the interpreter's 4
    processors.  A turn has 16 splits, so one of 200 keys among 8 of 20 has three."""
    lens = (20,) * 5 + (200,) + (20,) * 3
    batch = BatchSpec(prefix_lens=tuple(n - 1 for n in lens), extend_lens=(1,) * len(lens))
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=128, v_head_dim=128, dtype=torch.float16)
    fewer = replace(batch, prefix_lens=batch.prefix_lens[:8], extend_lens=batch.extend_lens[:8])
    warps: list[tuple[int, int, int]] = []
    start = paged_decode_kernel.launch

    def note(kernel: object, *args: object, **options: Any) -> None:
        warps.append(tuple(options[each] for each in ("num_warps", "BLOCK_KEYS", "MIN_TILES")))
        start(kernel, *args, **options)

    monkeypatch.setattr(paged_decode_kernel, "launch", note)
    for each in (batch, fewer):
        case = make_case(each, shape, seed=20)
        assert_matches(case, run_decode(case))
    assert warps == [(1, 16, 6), (2, 32, 3)]


def test_one_of_many_splits_of_narrow_heads_is_worth_one_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def least_tiles(dim: int, splits: int, turn: int | None = None) -> int:
        found: list[int] = []
        monkeypatch.setattr(
            paged_decode_kernel, "launch", lambda *_, **options: found.append(options["MIN_TILES"])
        )
        case = make_case(DECODE, Shape(head_dim=dim, v_head_dim=dim, dtype=torch.half), seed=21)
        paged_decode_kernel.launch_paged_decode(
            case.call(), workspace_of(case, 3), splits=splits, turn=turn
        )
        return found[0]

    assert least_tiles(64, 16) == 1
    assert least_tiles(64, 15) == 3
    assert least_tiles(64, 16, turn=16) == 3
    assert least_tiles(128, 16) == 3


def test_a_request_alone_has_more_warps_and_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[tuple[int, bool]] = []
    start = paged_decode_kernel.launch

    def note(kernel: object, *args: object, **options: Any) -> None:
        noted.append((options["num_warps"], options["IS_ALONE"]))
        start(kernel, *args, **options)

    monkeypatch.setattr(paged_decode_kernel, "launch", note)
    for lens, heads, dim in (
        ((300,), 8, 128),
        ((300, 20), 8, 128),
        ((300,), 4, 128),
        ((300,), 8, 64),
    ):
        batch = BatchSpec(prefix_lens=tuple(n - 1 for n in lens), extend_lens=(1,) * len(lens))
        sizes = {"num_heads": heads, "num_kv_heads": 1, "head_dim": dim, "v_head_dim": dim}
        case = make_case(batch, Shape(**sizes, dtype=torch.float16), seed=20)
        assert_matches(case, run_decode(case))
    assert noted == [(4, True), *[(2, False)] * 3]


def test_slots_are_whole_turns_of_all_processors_and_one_more() -> None:
    """Four processors hold 16 programs of two warps, 32 of one: 8 and 16 of each KV head."""

    def slots(reqs: int, kv_heads: int = 2, one: bool = False) -> tuple[int, int] | None:
        return decode_slots(reqs, kv_heads, max_keys=1000, in_one_warp=one, device=CPU)

    assert slots(1) is None
    assert slots(5) == (8, 13)
    assert slots(8) == (8, 16)
    assert slots(9) == (8, 24)
    assert slots(16, one=True) == (16, 32)
    assert slots(17, one=True) == (16, 48)
    assert slots(9, kv_heads=24) == (1, 10)


def test_heads_that_were_measured_are_attended_to_by_one_warp() -> None:
    def takes(reqs=9, heads=4, kv_heads=2, dim=128, v_dim=128, dtype=torch.half, kv=None) -> bool:
        q = torch.empty(reqs, heads, dim, dtype=dtype)
        caches = [torch.empty(1, 16, kv_heads, each, dtype=kv or dtype) for each in (dim, v_dim)]
        return takes_one_warp(q, *caches)

    assert takes()
    assert takes(dtype=torch.bfloat16)
    assert takes(heads=32)
    assert not takes(reqs=8)
    assert takes(reqs=8, kv_heads=4)
    assert not takes(heads=34)  # groups of 17
    assert takes(dim=64, v_dim=64)
    assert not takes(dim=32, v_dim=32)
    assert not takes(v_dim=64)
    assert not takes(kv=torch.float8_e4m3fn)
    assert not takes(dtype=torch.float32)


@pytest.mark.parametrize("window", [Chunk(80), 40])
def test_splits_by_length_go_by_the_keys_that_are_seen(window: int | Chunk) -> None:
    """Of 97 keys the last 17 of a chunk, of 80 all, of 81 one."""
    lens = (97, 80, 81, 160, 1, 43)
    batch = BatchSpec(prefix_lens=tuple(n - 1 for n in lens), extend_lens=(1,) * len(lens))
    case = make_case(batch, Shape(window=window), seed=19)
    assert_matches(case, run_splits(case, 0, 1, turn=16))


def test_a_merge_of_more_splits_than_it_reads_at_a_time_weighs_them_all() -> None:
    """Seven splits of sixteen heads of 256, four at a time."""
    case = make_case(DECODE, Shape(num_heads=16, v_head_dim=256), seed=32)
    assert_matches(case, run_splits(case, 7, 1))


def test_split_workspace_covers_every_number_of_requests() -> None:
    workspace = split_workspace(70, [(8, 2)], v_head_dim=16, device=CPU)
    assert workspace.finished.shape == (70, 8)
    for num_reqs in range(1, 71):
        splits = decode_splits(num_reqs, 2, device=CPU)
        assert 1 <= splits <= 64
        rows = workspace.partial_out.shape[0]
        assert num_reqs * splits <= rows == workspace.partial_lse.shape[0]
        for one_warp in (False, num_reqs > 8):
            slots = decode_slots(num_reqs, 2, max_keys=1000, in_one_warp=one_warp, device=CPU)
            assert (slots is None) == (splits > 4)
            assert slots is None or slots[1] <= rows


def test_cpu_without_interpreter_is_refused_with_a_remedy() -> None:
    program = (
        "import torch\n"
        "from paceline.kernels.paged_attention import *\n"
        "cache = PagedCache(torch.zeros(2, 16, 1, 64), torch.zeros(2, 16, 1, 64))\n"
        "lens = torch.ones(1, dtype=torch.int32)\n"
        "workspace = split_workspace(1, [(1, 1)], v_head_dim=64, device=lens.device)\n"
        "rows = PagedRows(lens[:, None], lens - 1, lens, torch.tensor([0, 1]), 1)\n"
        "q = torch.zeros(1, 1, 64)\n"
        "out, lse = torch.zeros(1, 1, 64), torch.zeros(1, 1)\n"
        "call = PagedCall(q, cache, rows, Weighing(1.0), out, lse)\n"
        "paged_decode(call, workspace)\n"
    )
    env = {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert "q of paged_decode must be on a CUDA device, got a CPU tensor" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


@pytest.mark.parametrize("run", [run_decode, run_extend], ids=["decode", "extend"])
def test_missing_triton_is_named_with_a_remedy(
    run: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.kernels._check.find_spec", lambda name: None)
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=20)
    with pytest.raises(KernelArgumentError, match=r"must be run where triton is installed.*torch"):
        run(case)


BAD_ARGUMENTS = {
    "q": (lambda t: t[0], r"q must be \[tokens, heads, head_dim\]"),
    "cache.k": (lambda t: t.half(), r"k_cache must be torch.float32 or torch.float8_e4m3fn \[num"),
    "cache.v": (lambda t: t[:2], r"v_cache must be torch.float32"),
    "cache.k_scale": (
        lambda t: torch.ones(1),
        r"k_scale must be None, for a cache of torch.float32",
    ),
    "rows.page_table": (lambda t: t.long(), r"page_table must be int32 \[3, max_pages\]"),
    "rows.kv_lens": (lambda t: t[:2], r"kv_lens must be contiguous int32 \[3\]"),
    "weighing.prefix_only": (
        lambda _: True,
        "prefix_only must be False, as a decode reads its own",
    ),
    "weighing.sinks": (lambda t: torch.ones(3), r"sinks must be None or contiguous float32 \[2\]"),
    "weighing": (
        lambda w: w._replace(window=3, chunk=4),
        "chunk must be None, or at least 1 without a window, got 4, with a window of 3",
    ),
    "out": (lambda t: t.half(), r"out must be torch.float32 \[3, 2, 64\]"),
    "lse": (lambda t: t.half(), r"lse must be contiguous float32 \[3, 2\], got float16"),
    "lse ": (lambda t: None, r"lse must be contiguous float32 \[3, 2\], got None"),
}
BAD_WORKSPACES = {
    "partial_out": (
        lambda t: t[:1],
        r"workspace.partial_out must be contiguous torch.float32 with at least",
    ),
    "finished": (
        lambda t: t.long(),
        r"workspace.finished must be contiguous torch.int32 with at least 6 elements",
    ),
}


def spoiled(call: PagedCall, path: str, spoil: Callable[[Any], Any]) -> PagedCall:
    """The call with one of its parts, or a part's field, replaced."""
    part, _, field = path.strip().partition(".")
    value = getattr(call, part)
    spoilt = value._replace(**{field: spoil(getattr(value, field))}) if field else spoil(value)
    return call._replace(**{part: spoilt})


@pytest.mark.parametrize("path", BAD_ARGUMENTS)
def test_bad_argument_is_named_with_what_was_expected(path: str) -> None:
    spoil, text = BAD_ARGUMENTS[path]
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=19)
    with pytest.raises(KernelArgumentError, match=text):
        paged_decode(spoiled(case.call(), path, spoil), workspace_of(case, 3))


@pytest.mark.parametrize("name", BAD_WORKSPACES)
def test_bad_workspace_is_named_with_what_was_expected(name: str) -> None:
    spoil, text = BAD_WORKSPACES[name]
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=19)
    workspace = workspace_of(case, 3)
    with pytest.raises(KernelArgumentError, match=text):
        paged_decode(case.call(), replace(workspace, **{name: spoil(getattr(workspace, name))}))


def test_a_workspace_of_narrower_heads_is_refused_where_short_requests_have_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splits, "_MOST_SPLIT_ROWS", 100)
    case = make_case(FEW, SHAPES["gqa4-128-bf16"], seed=20)
    narrow = split_workspace(6, [(4, 1)], v_head_dim=16, device=CPU)
    with pytest.raises(KernelArgumentError, match=r"workspace\.partial_out must be contiguous"):
        run_extend(case, workspace=narrow)


@pytest.mark.parametrize("name", ["prefix_lens", "kv_lens", "cu_seqlens_q"])
def test_bad_extend_lengths_are_named(name: str) -> None:
    case = make_case(RAGGED, SHAPES["mha-64-page1"], seed=21)
    call = spoiled(case.call(), f"rows.{name}", lambda lens: lens.long())
    with pytest.raises(KernelArgumentError, match=f"{name} must be contiguous int32"):
        paged_extend(call)
