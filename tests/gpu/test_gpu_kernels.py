"""The compiled kernels against their references, on memory that starts as NaN."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

import attention_gate
import kernels_gate

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

Sweep = Callable[[str], Iterator[tuple[str, kernels_gate.Failure | None]]]
SWEEPS: dict[str, Sweep] = {
    "small ops": kernels_gate.check_small_ops,
    "attention": partial(attention_gate.check_attention, quick=False),
    "replay": attention_gate.check_replay,
}


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("sweep", SWEEPS)
def test_compiled_kernels_equal_their_references(sweep: str) -> None:
    torch.manual_seed(0)
    found = list(SWEEPS[sweep]("cuda"))
    assert found
    assert [failure for _, failure in found if failure is not None] == []


@pytest.mark.usefixtures("nan_memory")
def test_uninitialised_memory_is_nan() -> None:
    x = torch.ones(2, 3, device="cuda")
    assert torch.empty(7, device="cuda").isnan().all()
    assert torch.empty_like(x).isnan().all()
    assert x.new_empty(5).isnan().all()
