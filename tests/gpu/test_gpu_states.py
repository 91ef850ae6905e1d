"""Layers that keep states, compiled, at the sizes of real ones."""

import pytest
import torch

from linear_attention import ERROR_LIMIT, backend_run, make_work
from paceline.attention.linear.shape import GDN, MAMBA2

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("kind", [GDN, MAMBA2])
@pytest.mark.parametrize(
    ("what", "reqs", "rows"),
    [
        ("decode", 3, 1),
        ("decode", 40, 1),
        ("commit", 3, 8),
        ("prefill", 2, 17),
        ("prefill", 2, 65),
        ("prefill", 3, 200),
    ],
)
@torch.inference_mode()
def test_our_kernels_equal_torch_at_real_widths(kind: str, what: str, reqs: int, rows: int) -> None:
    work = make_work(kind, what, reqs, rows, torch.device("cuda"))
    wanted = backend_run(work, "torch")[1]()
    for found, held in zip(backend_run(work, "triton")[1](), wanted, strict=True):
        apart = (found.float() - held.float()).abs().max() / held.float().abs().max()
        assert apart <= ERROR_LIMIT
