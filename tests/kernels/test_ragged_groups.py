"""The way of ragged_attention and paged_extend that no interpreter runs: when it is taken, which
items its programs have, and that a compiler takes it.  What it gives is tested on a GPU."""

import inspect
import random
import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from absent_gpu import run_compiling
from paged_cases import BatchSpec, Shape, make_case

from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    Weighing,
    paged_extend,
)
from paceline.kernels.stand_in import StandIn

pytest.importorskip("triton")

SCRIPT = """
import torch

from paceline.kernels._triton import ragged_groups

def show(kernel, grid, *args, **options):
    found = kernel.warmup(*args, grid=grid, **options).asm["ptx"]
    print(grid[0], options["HEADS"], "wgmma.mma_async" in found, "cp.async.bulk.tensor" in found)

ragged_groups.multiprocessors = lambda device: 132
lse, cu = torch.empty(2048, 4), torch.zeros(5, dtype=torch.int32)
for dtype, kv_heads in ((torch.bfloat16, 2), (torch.float16, 4)):
    q = torch.empty(2048, 4 + 2 * kv_heads, 128, dtype=dtype)
    q, k, v = q.split([4, kv_heads, kv_heads], dim=1)
    out = torch.empty(q.shape, dtype=dtype)
    asked = {"causal": kv_heads == 2}
    ragged_groups.launch = show
    ragged_groups.launch_ragged_groups(q, k, v, cu, cu, 1.0, out, lse, **asked)
    ragged_groups.launch = launch.launch
    with launch.compile_only():  # as a boot does, and starts nothing
        ragged_groups.launch_ragged_groups(q, k, v, cu, cu, 1.0, out, lse, **asked)
        print(len(launch._SEEN.get()))
"""

PAGED = """
import re

import torch

from paceline.kernels._triton import ragged_groups
from paceline.kernels.paged_attention import PagedCache, PagedCall, PagedRows, Weighing

def show(kernel, grid, *args, **options):
    found = kernel.warmup(*args, grid=grid, **options).asm["ptx"]
    keys, size, tiles = (options[name] for name in ("BLOCK_KEYS", "PAGE_SIZE", "K_STAGES"))
    asked = ("cp.async.bulk.tensor.3d", "ld.global.v4", "f16x2.e4m3x2")
    ordered = re.findall(r"(fence)\\.proxy|(sync)\\b\\s|mbarrier\\.(arrive)", found)
    met = " ".join(map("".join, ordered)).count("fence sync arrive")
    print(grid[0], keys, size, tiles, *(found.count(each) for each in asked), met)

ragged_groups.multiprocessors = lambda device: 132
ragged_groups.launch = show
lens = torch.zeros(5, dtype=torch.int32)
bfloat16, float16, codes = torch.bfloat16, torch.float16, torch.float8_e4m3fn
for page, longest, dtype, kv_dtype in (
    (16, 1000, bfloat16, bfloat16),
    (64, 1000, float16, float16),
    (16, 2049, bfloat16, bfloat16),
    (128, 2049, bfloat16, bfloat16),
    (16, 1000, bfloat16, codes),
    (128, 2049, float16, codes),
):
    q = torch.empty(2048, 8, 128, dtype=dtype)
    cache = torch.empty(9, page, 2, 128, dtype=kv_dtype)
    rows = PagedRows(torch.zeros(4, 9, dtype=torch.int32), lens[1:], lens[1:], lens, longest)
    scales = [torch.ones(1)] * 2 if kv_dtype is codes else [None] * 2
    cache = PagedCache(cache, cache.clone(), *scales)
    call = PagedCall(q, cache, rows, Weighing(1.0), torch.empty_like(q), torch.empty(2048, 8))
    ragged_groups.launch_paged_groups(call, above=4, leads=True)
"""


@pytest.mark.slow  # seconds of a compiler
def test_a_compiler_takes_tiles_of_pages(tmp_path: Path) -> None:
    """A piece of a page is 64 columns of 16 rows, or of as many as a page has: of 64 keys with 128
    columns 8 pieces or 2, of keys and as many of values, of 128 keys 16 or 2.  Codes come by 16 to
    a thread: of 64 keys and values 8 times, in two places.  All warps that lay down numbers meet
    before one says that they are there, of keys and of values, as those do that clear values."""
    found = run_compiling(PAGED, tmp_path)
    assert found.splitlines() == [
        "132 64 16 3 16 0 0 2",
        "132 64 64 3 4 0 0 2",
        "132 128 16 2 32 0 0 2",
        "132 128 128 2 4 0 0 2",
        "132 64 16 3 0 16 64 2",
        "132 128 128 2 0 32 128 2",
    ]


@pytest.mark.slow  # seconds of a compiler
def test_a_compiler_takes_both_forms(tmp_path: Path) -> None:
    """2,048 queries of 2 pairs of heads are 72 items at most, those of 4 heads 80."""
    found = run_compiling(SCRIPT, tmp_path)
    assert found.splitlines() == ["72 2 True True", "1", "80 1 True True", "1"]


class Memory:
    """What a pointer points to: an address is what stands there."""

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values)

    def __add__(self, place: Any) -> Any:
        return self.values[place]


def plain_functions(num_programs: int) -> SimpleNamespace:
    """Those that deal items out, of numpy's numbers, four requests at a time."""
    from paceline.kernels._triton import ragged_groups as kernels

    language = SimpleNamespace(
        where=np.where, minimum=np.minimum, maximum=np.maximum, sum=np.sum, constexpr=int,
        load=lambda there: there, arange=lambda first, end, layout: np.arange(first, end),
        associative_scan=lambda values, axis, add: np.cumsum(values, axis),
        num_programs=lambda axis: num_programs, BlockedLayout=lambda *sizes: None,
    )  # fmt: skip
    names = ("_costs", "_add", "_num_queries", "_num_keys", "_all_costs", "_pair", "_tile_at")
    found: dict[str, Any] = {"gl": language, "_BLOCK_REQS": 4, "_WARPS": 4}
    found |= {name: getattr(kernels, name).value for name in ("_COST_KEYS", "_COST_OF_ITEM")}
    for name in (*names, "_begin", "_next"):
        source = inspect.getsource(getattr(kernels, name).fn)
        exec(re.sub(r"@gluon\.jit|\.to\(gl\.int\d+\)", "", source), found)
    return SimpleNamespace(**found)


def test_the_worked_example_of_tiles_by_pairs_holds() -> None:
    tile_at = plain_functions(1)._tile_at
    for unit, order in enumerate([[4, 0, 3, 1, 2], [3, 1, 4, 0, 2]] * 2):
        assert [tile_at(place, unit, 5) for place in range(5)] == order


@pytest.mark.parametrize("seed", range(40))
def test_every_item_is_one_programs_and_their_ranges_cost_the_same(seed: int) -> None:
    """A program begins with the item in which its share of all costs begins."""
    rng = random.Random(seed)
    causal, page_size = rng.choice(((True, 16), (True, None), (False, None)))
    rows, units, above = rng.choice((64, 128)), rng.randint(1, 8), rng.choice((0, 4, 16))
    programs = rng.choice((1, rng.randint(2, 131), 132))
    num_q = [rng.choice((0, 4, 16, 640, rng.randint(1, 3000))) for _ in range(rng.randint(1, 11))]
    num_k = [rng.choice((0, q // 2, q, q + rng.randint(0, 5000))) for q in num_q]
    reqs, behind = len(num_q), rng.choice((0, 300))  # rows behind the last request
    cu_q, cu_k = ([sum(lens[:count]) for count in range(reqs + 1)] for lens in (num_q, num_k))
    texts = (Memory(cu_q), Memory(num_k if page_size else cu_k), cu_q[-1] + behind, reqs, above)

    costs = {}
    for request, (q, k) in enumerate(zip((*num_q, behind), (*num_k, 0), strict=True)):
        for tile in range(-(-q // rows) if q > above else 0):
            walked = max(k - q, 0) // 64 + (tile + 1) * rows // 64 if causal else -(-k // 64)
            costs |= {(request, unit, tile): 4 + (walked if k else 0) for unit in range(units)}

    if len(costs) <= programs:
        costs = dict.fromkeys(costs, 4)

    plain, dealt = plain_functions(programs), []
    sizes = units, causal, page_size, rows
    begins = [plain._begin(program, texts, *sizes) for program in range(programs + 1)]
    for (first, *item), (end, *_) in pairwise(begins):
        for left in range(end - first, 0, -1):
            request, unit, place = map(int, item)
            tiles = -(-(*num_q, behind)[request] // rows)
            dealt.append((request, unit, int(plain._tile_at(place, unit, tiles))))
            if left > 1:
                item = plain._next(request, unit, place, texts, units, rows)
    assert sorted(dealt) == sorted(costs)
    spent = list(accumulate((costs[item] for item in dealt), initial=0))
    for program, (first, *_) in enumerate(begins[: programs if dealt else 0]):
        assert spent[first] <= spent[-1] * program // programs < spent[first + 1]


def test_wide_heads_take_it_on_hopper() -> None:
    from paceline.kernels._triton.ragged_attention import fits_groups

    def fits(tokens=1024, dim=128, heads=4, first=0, **where) -> bool:
        where = {"dtype": torch.bfloat16, "arch": (9, 0), "kind": "cuda", "out": None} | where
        with StandIn(where["kind"], None, where["arch"]):
            x = torch.empty(tokens, heads * dim + 8, device="meta", dtype=where["dtype"])
            x = x[:, first : first + heads * dim].view(tokens, heads, dim)
            return fits_groups(x, x, x, torch.empty_like(x, dtype=where["out"]))

    assert fits()
    assert not fits(dim=64)
    assert not fits(dim=256)
    assert fits(first=8)
    assert not fits(first=4)
    assert fits(dtype=torch.float16)
    assert not fits(dtype=torch.float32)
    assert not fits(out=torch.float32)
    assert not fits(arch=(8, 9))
    assert not fits(arch=(10, 0))
    assert not fits(arch=None)
    assert not fits(kind="cpu", arch=None)


Changed = Callable[[PagedCall], PagedCall]


def of_rows(**changed: Any) -> Changed:
    return lambda call: call._replace(rows=call.rows._replace(**changed))


def of_weighing(**changed: Any) -> Changed:
    return lambda call: call._replace(weighing=call.weighing._replace(**changed))


def of_pages(page_size: int, dtype: torch.dtype = torch.bfloat16) -> Changed:
    cache = torch.empty(99, page_size, 2, 128, device="meta", dtype=dtype)
    return lambda call: call._replace(cache=PagedCache(cache, cache))


def of_codes(
    page_size: int = 16, dtype: torch.dtype = torch.float8_e4m3fn, first: int = 0
) -> Changed:
    """first: column where heads begin."""
    scale = torch.empty(1, device="meta")
    cache = torch.empty(2, 99, page_size, 3 * 128, device="meta", dtype=dtype)
    k, v = cache[..., first : first + 256].unflatten(3, (2, 128))
    return lambda call: call._replace(cache=PagedCache(k, v, scale, scale))


def of_other_values(call: PagedCall) -> PagedCall:
    """In pages of other strides than the keys'."""
    cache = of_codes()(call).cache
    return call._replace(cache=cache._replace(v=cache.v.contiguous()))


OTHERS: dict[str, Changed] = {
    "full": of_rows(mask=MaskKind.FULL),
    "tree": of_rows(mask=MaskKind.TREE),
    "blocks": of_rows(mask=MaskKind.BLOCK),
    "window": of_weighing(window=5000),
    "chunks": of_weighing(chunk=5000),
    "cap": of_weighing(soft_cap=30.0),
    "prefix": of_weighing(prefix_only=True),
    "sinks": of_weighing(sinks=torch.empty(8, device="meta")),
    "pages of 8": of_pages(8),
    "pages of 48": of_pages(48),
    "float8 without scales": of_pages(16, torch.float8_e4m3fn),
    "16 bits with scales": of_codes(dtype=torch.bfloat16),
    "codes of another kind": of_codes(dtype=torch.float8_e5m2),
    "codes that no 16 bytes begin with": of_codes(first=8),
    "codes in pages of 8": of_codes(8),
    "codes with values elsewhere": of_other_values,
    "other numbers": of_pages(16, torch.float16),
    "other keys": lambda call: call._replace(cache=call.cache._replace(k=call.cache.k.half())),
    "other values": lambda call: call._replace(cache=call.cache._replace(v=call.cache.v.half())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_plain_prompts_in_pages_take_it_and_others_do_not(name: str) -> None:
    from paceline.kernels._triton.paged_extend import takes_groups

    q = torch.empty(1024, 8, 128, device="meta", dtype=torch.bfloat16)
    lens = torch.empty(5, device="meta", dtype=torch.int32)
    rows = PagedRows(torch.empty(4, 9, device="meta"), lens, lens, lens, 1024)
    plain = PagedCall(
        q, PagedCache(q, q), rows, Weighing(0.1), q, torch.empty(1024, 8, device="meta")
    )
    with StandIn("cuda", 132, (9, 0)):
        for page_size in (16, 32, 64, 128):
            assert takes_groups(of_pages(page_size)(plain))
            assert takes_groups(of_codes(page_size)(plain))
        assert takes_groups(of_codes(first=16)(plain))
        assert not takes_groups(OTHERS[name](of_pages(16)(plain)))
    with StandIn("cuda", 132, (8, 0)):
        assert not takes_groups(of_pages(16)(plain))


WIDE = Shape(num_heads=4, head_dim=128, v_head_dim=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("least", "mixed", "many", "launches"),
    [
        (10 * 4, 99, 3, ["groups above 0"]),
        (10 * 4 + 1, 1, 3, ["above 0"]),
        (99, 10 * 4, 2, ["groups above 4, leads", "up to 16, follows"]),
        (1, 10 * 4 + 1, 2, ["above 16", "up to 16, follows"]),
    ],
)
def test_decodes_beside_prompts_stay_with_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, least: int, mixed: int, many: int, launches: list[str]
) -> None:
    """A decode and nine queries; of four heads to a KV head 16 rows are four queries."""
    from paceline.kernels._triton import paged_extend as kernels
    from paceline.kernels._triton import ragged_groups as groups

    found: list[str] = []

    def launch(call: PagedCall, *, above: int, leads: bool) -> None:
        found.append(f"groups above {above}{', leads' * leads}")

    def start(*args: Any, most: int = 0, above: int = 0, follows: bool = False, **_: Any) -> None:
        found.append(f"up to {most}, follows" if follows else f"above {above}")

    monkeypatch.setattr(kernels, "takes_groups", lambda call: True)
    monkeypatch.setattr(kernels, "_GROUP_ROWS", least)
    monkeypatch.setattr(kernels, "_MIXED_GROUP_ROWS", mixed)
    monkeypatch.setattr(kernels, "_MANY_PROGRAMS", many)
    monkeypatch.setattr(kernels, "_start", start)
    monkeypatch.setattr(groups, "launch_paged_groups", launch)
    paged_extend(make_case(BatchSpec(prefix_lens=(5, 0), extend_lens=(1, 9)), WIDE, seed=1).call())
    assert found == launches


@pytest.mark.parametrize(
    ("extend_lens", "takes"),
    [
        ((24_576,), True),
        ((24_575,), False),
        ((*[1] * 127, 6017), True),  # with decodes in a launch beside it
        ((*[1] * 127, 6016), False),
    ],
)
def test_so_many_rows_are_enough_and_tiles_that_are_asked_for_are_taken(
    monkeypatch: pytest.MonkeyPatch, extend_lens: tuple[int, ...], takes: bool
) -> None:
    """Of one head."""
    from paceline.kernels._triton import paged_extend as kernels
    from paceline.kernels._triton import ragged_groups as groups
    from paceline.kernels._triton.runtime import SplitConfig

    found: list[str] = []
    monkeypatch.setattr(kernels, "takes_groups", lambda call: True)
    monkeypatch.setattr(kernels, "_start", lambda *_, **options: None)
    monkeypatch.setattr(groups, "launch_paged_groups", lambda *_, **options: found.append("taken"))
    batch = BatchSpec(prefix_lens=(0,) * len(extend_lens), extend_lens=extend_lens)
    shape = Shape(num_heads=1, head_dim=16, v_head_dim=16, dtype=torch.bfloat16)
    call = make_case(batch, shape, seed=1).call()
    paged_extend(call)
    asked = SplitConfig(block_rows=16, block_keys=16, num_warps=4, num_stages=2, min_tiles=1)
    kernels.launch_paged_extend(call, None, splits=1, config=asked)
    assert found == ["taken"] * takes


@pytest.mark.parametrize(("longest", "keys"), [(2048, 64), (2049, 128)])
def test_long_texts_take_more_keys_at_a_time(
    monkeypatch: pytest.MonkeyPatch, longest: int, keys: int
) -> None:
    """Of whole texts the mean says how long they are, of a step its longest request."""
    from paceline.kernels._triton import ragged_groups as groups

    found: list[int] = []
    monkeypatch.setattr(groups, "launch", lambda *_, **options: found.append(options["BLOCK_KEYS"]))
    monkeypatch.setattr(groups, "overlap_options", lambda device, kernel: {})
    x, lse = torch.empty(2 * longest + 1, 2, 128).bfloat16(), torch.empty(2 * longest + 1, 2)
    lens = torch.tensor([0, 1, len(x)], dtype=torch.int32)
    groups.launch_ragged_groups(x, x, x, lens, lens, 1.0, x, lse, causal=True)
    pages = torch.empty(9, 16, 2, 128).bfloat16()
    rows = PagedRows(torch.zeros(2, 9).int(), lens[1:], lens[1:], lens, longest)
    call = PagedCall(x, PagedCache(pages, pages), rows, Weighing(1.0), x, lse)
    groups.launch_paged_groups(call, above=0, leads=False)
    assert found == [keys, keys]


@pytest.mark.parametrize("tokens", [1023, 1024])
def test_whole_texts_take_it_from_so_many_queries_on(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    from paceline.kernels._triton import ragged_attention as kernels
    from paceline.kernels._triton import ragged_groups as groups

    found: list[str] = []
    monkeypatch.setattr(kernels, "fits_groups", lambda *given: True)
    monkeypatch.setattr(kernels, "launch", lambda *given, **options: found.append("other"))
    monkeypatch.setattr(
        groups, "launch_ragged_groups", lambda *given, **options: found.append("groups")
    )
    x, cu = torch.empty(tokens, 2, 128), torch.zeros(2, dtype=torch.int32)
    kernels.launch_ragged_attention(
        x, x, x, None, None, cu, cu, None, None, 1.0, None, None, 1, x, torch.empty(tokens, 2)
    )
    assert found == ["groups" if tokens == 1024 else "other"]
