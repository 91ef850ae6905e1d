"""The way of ragged_attention and paged_extend that no interpreter runs: when it is taken, and that
a compiler takes it.  What it gives is tested on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
import torch

from paceline.kernels._triton import ragged_groups
from paceline.kernels.paged_attention import PagedCache, PagedCall, PagedRows, Weighing

def show(kernel, grid, *args, **options):
    found = kernel.warmup(*args, grid=grid, **options).asm["ptx"]
    keys, size, tiles = (options[name] for name in ("BLOCK_KEYS", "PAGE_SIZE", "K_STAGES"))
    print(grid[0], keys, size, tiles, found.count("cp.async.bulk.tensor.3d"))

ragged_groups.multiprocessors = lambda device: 132
ragged_groups.launch = show
lens = torch.zeros(5, dtype=torch.int32)
for page, longest in ((16, 1000), (64, 1000), (16, 2049), (128, 2049)):
    q = torch.empty(2048, 8, 128, dtype=torch.bfloat16)
    cache = torch.empty(9, page, 2, 128, dtype=torch.bfloat16)
    rows = PagedRows(torch.zeros(4, 9, dtype=torch.int32), lens[1:], lens[1:], lens, longest)
    cache = PagedCache(cache, cache.clone())
    call = PagedCall(q, cache, rows, Weighing(1.0), torch.empty_like(q), torch.empty(2048, 8))
    ragged_groups.launch_paged_groups(call, above=4, leads=True)
"""


@pytest.mark.slow  # seconds of a compiler
def test_a_compiler_takes_tiles_of_pages(tmp_path: Path) -> None:
    """A piece of a page is 64 columns of 16 rows, or of as many as a page has: of 64 keys with 128
    columns 8 pieces or 2, of keys and as many of values, of 128 keys 16 or 2."""
    found = run_compiling(PAGED, tmp_path)
    assert found.splitlines() == [
        "132 64 16 3 16",
        "132 64 64 3 4",
        "132 128 16 2 32",
        "132 128 128 2 4",
    ]


@pytest.mark.slow  # seconds of a compiler
def test_a_compiler_takes_both_forms(tmp_path: Path) -> None:
    """2,048 queries of 2 pairs of heads are 72 items at most, those of 4 heads 80."""
    found = run_compiling(SCRIPT, tmp_path)
    assert found.splitlines() == ["72 2 True True", "1", "80 1 True True", "1"]


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
    "float8": of_pages(16, torch.float8_e4m3fn),
    "other numbers": of_pages(16, torch.float16),
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
