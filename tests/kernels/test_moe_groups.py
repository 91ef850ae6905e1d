"""The way of moe_experts that no interpreter runs: when it is taken, and that a compiler takes it.
What it gives is tested on a GPU."""

import math
from pathlib import Path

import pytest
import torch
from absent_gpu import run_compiling

from paceline.kernels.moe_experts import ExpertWeights
from paceline.kernels.stand_in import StandIn

pytest.importorskip("triton")

SCRIPT = """
import torch

from paceline.kernels._triton import moe_groups
from paceline.kernels.moe_align import Alignment
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU

def show(kernel, grid, *args, **options):
    found = kernel.warmup(*args, grid=grid, **options).asm["ptx"]
    said = ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.async.cg")
    print(grid[0], *(each in found for each in said))

moe_groups.multiprocessors = lambda device: 132
for dtype, inter, bias in ((torch.bfloat16, 128, None), (torch.float16, 192, torch.empty(2, 384))):
    order = torch.zeros(2048, dtype=torch.int32)
    aligned = Alignment(order, torch.zeros(17, 3, dtype=torch.int32))
    gate_up = torch.empty(2, 2 * inter, 512, dtype=dtype)
    weights = ExpertWeights(gate_up, bias, torch.empty(2, 512, inter, dtype=dtype), bias)
    asked = {
        "gate": SwiGLU(1.0, None if bias is None else 7.0, 0.0),
        "gated": torch.empty(2048, inter, dtype=dtype),
        "parts": torch.empty(2048, 512, dtype=dtype),
    }
    x, shares = torch.empty(1024, 512, dtype=dtype), torch.empty(1024, 2)
    moe_groups.launch = show
    moe_groups.launch_group_products(x, shares, weights, aligned, **asked)
    moe_groups.launch = launch.launch
    with launch.compile_only():  # as a boot does, and starts nothing
        moe_groups.launch_group_products(x, shares, weights, aligned, **asked)
        print(len(launch._SEEN.get()))
"""


@pytest.mark.slow  # seconds of a compiler
def test_a_compiler_takes_both_products(tmp_path: Path) -> None:
    """17 blocks by the tiles of 256, 384 and 512 columns."""
    found = run_compiling(SCRIPT, tmp_path).splitlines()
    first, second = "True True True", "True True False"
    assert found == [f"17 {first}", f"34 {second}", "2", f"34 {first}", f"34 {second}", "2"]


def test_many_pairs_of_an_expert_take_it_on_hopper() -> None:
    from paceline.kernels._triton.moe_experts import fits_groups

    def fits(
        pairs=33.0, hidden=128, inter=192, apart=0, dtype=torch.bfloat16, shifted="", **where
    ) -> bool:
        def made(name: str, *size: int) -> torch.Tensor:
            first = int(name == shifted)  # number, which then is at no multiple of 16 bytes
            memory = torch.empty(math.prod(size) + first, device="meta", dtype=dtype)
            return memory[first:].view(size)

        where = {"arch": (9, 0), "kind": "cuda"} | where
        with StandIn(where["kind"], None, where["arch"]):
            x = made("x", 64, hidden + apart)[:, :hidden]
            gate_up, down = made("gate_up", 4, 2 * inter, hidden), made("down", 4, hidden, inter)
            return fits_groups(x, ExpertWeights(gate_up, None, down, None), pairs)

    assert fits()
    assert not fits(pairs=32.0)
    assert not fits(hidden=96)
    assert not fits(inter=96)
    assert fits(apart=64)
    assert not fits(apart=8)
    for name in ("x", "gate_up", "down"):
        assert not fits(shifted=name)
    assert fits(dtype=torch.float16)
    assert not fits(dtype=torch.float32)
    assert not fits(arch=(8, 9))
    assert not fits(arch=(10, 0))
    assert not fits(arch=None)
    assert not fits(kind="cpu", arch=None)
