"""Kernels as a compiler takes them, for a GPU that need not be here.

Triton decides when it is imported whether it interprets, so this is for processes of its own: those
of `run_compiling`, and of `make compile` (compiling.py).
"""

import os
import subprocess
import sys
from pathlib import Path

_PREFACE = """
import sys

from absent_gpu import pretend
from paceline.kernels._triton import launch

pretend(int(sys.argv[1]))
"""


def pretend(arch: int) -> None:
    """Have Triton compile for a GPU of that compute capability, 90 for 9.0, from here on."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from paceline.kernels._triton import launch

    class AbsentGPU:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(AbsentGPU())
    launch._overlaps = lambda device: arch >= 90


def run_compiling(script: str, cache: Path, *, arch: str = "90") -> str:
    """What a script prints, whose launches compile or are `launch.compile_only`'s; cache: an empty
    folder for what is compiled."""
    path = os.pathsep.join(each for each in (*sys.path, str(Path(__file__).parent)) if each)
    compiling = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", _PREFACE + script, arch],
        env=os.environ | compiling,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    return done.stdout
