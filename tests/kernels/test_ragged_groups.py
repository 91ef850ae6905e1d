"""The way of ragged_attention that no interpreter runs: when it is taken, and that a compiler takes
it.  What it gives is tested on a GPU."""

from pathlib import Path

import pytest
import torch
from absent_gpu import run_compiling

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


@pytest.mark.slow  # seconds of a compiler
def test_a_compiler_takes_both_forms(tmp_path: Path) -> None:
    """2,048 queries of 2 pairs of heads are 72 items at most, those of 4 heads 80."""
    found = run_compiling(SCRIPT, tmp_path)
    assert found.splitlines() == ["72 2 True True", "1", "80 1 True True", "1"]


def test_many_queries_of_wide_heads_take_it_on_hopper() -> None:
    from paceline.kernels._triton.ragged_attention import fits_groups

    def fits(tokens=1024, dim=128, heads=4, first=0, **where) -> bool:
        where = {"dtype": torch.bfloat16, "arch": (9, 0), "kind": "cuda", "out": None} | where
        with StandIn(where["kind"], None, where["arch"]):
            x = torch.empty(tokens, heads * dim + 8, device="meta", dtype=where["dtype"])
            x = x[:, first : first + heads * dim].view(tokens, heads, dim)
            return fits_groups(x, x, x, torch.empty_like(x, dtype=where["out"]))

    assert fits()
    assert not fits(tokens=1023)
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
