"""What paged_extend takes from the compiler over latents in float8: a register of a scored tile has
two neighbours of the inner dimension.  Another order would be wrong without an error, and the
interpreter has no registers.  Compiled for GPUs that need not be here, in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.core.modes import MaskKind
from paceline.kernels._triton import launch, paged_extend
from test_latent_keys import latent_call

class AbsentGPU:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

def show(kernel, grid, *args, **options):
    print(kernel.warmup(*args, grid=grid, **options).asm["ttgir"])

driver.set_active(AbsentGPU())
launch._overlaps = lambda device: int(sys.argv[1]) >= 90
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
    path = os.pathsep.join(each for each in (*sys.path, str(Path(__file__).parent)) if each)
    compiling = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arch],
        env=os.environ | compiling,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    pairs = [line for line in done.stdout.splitlines() if "$0, low;" in line and "prmt" not in line]
    found = [OPERAND.search(line) for line in pairs]
    assert found
    assert all(each and int(each[1]) % 2 == 0 for each in found), pairs
