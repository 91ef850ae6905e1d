"""How much shared memory do the kernels of state_chunks take on a GPU that is not here?

    PYTHONPATH=src python benchmarks/state_chunks_memory.py --arch 89

Compiles them, as they are launched, for a compute capability, by widths of keys and chunks, with
the delta rule and without it; runs nothing and needs no GPU.  GPUs of 8.6 and 8.9 have 99 KiB a
program, 8.0 has 163, 9.0 has 227.  A row takes 5 to 60 s.
"""

import argparse
import os
import sys
from itertools import product
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.kernels._triton import launch, state_chunks

TOKENS, KEY_HEADS, HEADS, REQS, CHUNKS, SLOTS = 64, 2, 4, 2, 3, 5
VALUE_DIM = {True: 128, False: 64}  # by whether the delta rule is taken: of Qwen3-Next, of Mamba-2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class AbsentGPU:
    """What Triton asks a driver for, to compile."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launch_of(key_dim: int, size: int, dtype: torch.dtype, *, is_delta: bool) -> None:
    """The launch of one layer, over numbers that nobody reads."""
    value_dim = VALUE_DIM[is_delta]
    channels = 2 * KEY_HEADS * key_dim + HEADS * value_dim

    def of(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind)

    state_chunks.launch_state_chunks(
        of(TOKENS, KEY_HEADS, key_dim),
        of(TOKENS, KEY_HEADS, key_dim),
        of(TOKENS, HEADS, value_dim),
        of(TOKENS, HEADS, kind=torch.float32),
        of(TOKENS, HEADS, kind=torch.float32),
        None if is_delta else of(HEADS, kind=torch.float32),
        of(REQS + 1, kind=torch.int32),
        of(CHUNKS, kind=torch.int64),
        of(CHUNKS, size, kind=torch.int64),
        of(TOKENS, kind=torch.int64),
        of(SLOTS, HEADS, key_dim, value_dim, kind=torch.float32),
        of(REQS, 3, kind=torch.int32),
        of(TOKENS, channels),
        of(SLOTS, channels, 3),
        of(CHUNKS, HEADS, size, size) if is_delta else None,
        of(TOKENS, HEADS, value_dim),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, default=89, help="compute capability times 10")
    parser.add_argument("--keys", default="128,256")
    parser.add_argument("--sizes", default="16,64", help="rows of a chunk")
    args = parser.parse_args()
    driver.set_active(AbsentGPU(args.arch))
    launch._overlaps = lambda device: args.arch >= 90
    found: dict[str, int] = {}

    def note(*, src: Any, metadata: dict[str, Any], **_: Any) -> None:
        found[src.fn.__name__] = metadata["shared"]

    triton.knobs.compilation.listener = note
    keys, sizes = (tuple(map(int, each.split(","))) for each in (args.keys, args.sizes))
    for is_delta, dtype, key_dim, size in product((True, False), DTYPES, keys, sizes):
        found.clear()
        with launch.compile_only():
            launch_of(key_dim, size, DTYPES[dtype], is_delta=is_delta)
        shown = ", ".join(f"{name.strip('_')} {taken} bytes" for name, taken in found.items())
        rule = "delta rule" if is_delta else "no delta rule"
        print(f"keys of {key_dim} in {dtype}, chunks of {size}, {rule}: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
