"""Tests that need a CUDA device: `python -m pytest -m gpu tests/gpu`.

They run the compiled Triton kernels.  Triton decides when it is imported whether it interprets, so
a session of these tests alone switches the interpreter off, and any other session skips them.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def pytest_configure(config: pytest.Config) -> None:
    """Compile kernels where nothing but these tests will run."""
    if config.option.markexpr == "gpu":
        os.environ["TRITON_INTERPRET"] = "0"


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Skip where Triton was imported to interpret."""
    import triton.language

    from paceline.kernels._triton.runtime import interpreted

    if interpreted(triton.language.cdiv):
        pytest.skip("needs compiled kernels: select -m gpu alone, or set TRITON_INTERPRET=0")


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every floating-point tensor that Python allocates uninitialised starts as NaN."""
    import torch

    def poison(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
            made: torch.Tensor = original(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, poisoned)

    for name in ("empty", "empty_like", "empty_strided"):
        poison(torch, name)
    poison(torch.Tensor, "new_empty")
