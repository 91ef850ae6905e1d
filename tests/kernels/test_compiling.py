"""`make compile`: it fails where a compiler refuses a kernel, which an interpreter need not."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import torch
import triton
import triton.language as tl

from paceline.kernels._triton.launch import launch

@triton.jit
def add_one(x_ptr, WIDE: tl.constexpr):
    for place in tl.static_range(2):
        if tl.program_id(0) == WIDE:
            place = tl.load(x_ptr)  # of another type than before the branch
        tl.store(x_ptr + tl.program_id(0), 1.0)

@triton.jit
def store_one(x_ptr):
    tl.store(x_ptr, 1.0)

def test_taken():
    x = torch.zeros(1)
    launch(store_one, (1,), x)
    assert x[0] == 1  # which is not computed

def test_refused():
    launch(add_one, (1,), torch.zeros(1), WIDE=1)

def test_caught():
    try:
        launch(add_one, (1,), torch.zeros(1), WIDE=2)
    except Exception:
        assert False
"""


def test_a_kernel_that_no_compiler_takes_fails_and_what_is_not_computed_does_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "test_two_kernels.py"
    file.write_text(TESTS)
    here = Path(__file__).parent
    paths = os.pathsep.join(each for each in (str(here), *sys.path) if each)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "compiling", "-p", "no:cacheprovider", file, "-v"],
        env=os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    for name, verdict in (("taken", "PASSED"), ("refused", "FAILED"), ("caught", "FAILED")):
        assert f"::test_{name} {verdict}" in said, said
