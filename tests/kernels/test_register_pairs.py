"""What paged_extend takes from the compiler over latents in float8: a register of a scored tile has
two neighbours of the inner dimension.  Another order would be wrong without an error, and the
interpreter has no registers.
"""

import re
from pathlib import Path

import pytest
from absent_gpu import run_compiling

pytest.importorskip("triton")

SCRIPT = """
from paceline.core.modes import MaskKind
from paceline.kernels._triton import paged_extend
from test_latent_keys import latent_call

def show(kernel, grid, *args, **options):
    print(kernel.warmup(*args, grid=grid, **options).asm["ttgir"])

paged_extend.launch = show
paged_extend.require_runnable = lambda *args, **options: None
call = latent_call(16, [90], 1, MaskKind.CAUSAL, scaled=True, page_size=64)
paged_extend.launch_paged_extend(call, None, splits=1)
"""
# The operand, where it is what a matrix unit takes from the right.
OPERAND = re.compile(r" : tensor<\w+xi16, #ttg\.dot_op<\{opIdx = 1, .* kWidth = (\d+)\}>> -> ")


@pytest.mark.slow  # seconds of a compiler
@pytest.mark.parametrize("arch", ["89", "90"])
def test_a_register_of_scored_codes_has_neighbours_of_the_inner_dimension(
    arch: str, tmp_path: Path
) -> None:
    lines = run_compiling(SCRIPT, tmp_path, arch=arch).splitlines()
    pairs = [line for line in lines if "$0, low;" in line and "prmt" not in line]
    found = [OPERAND.search(line) for line in pairs]
    assert found
    assert all(each and int(each[1]) % 2 == 0 for each in found), pairs
