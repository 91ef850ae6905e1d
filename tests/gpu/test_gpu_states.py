"""Layers that keep states, compiled, at the sizes of real ones."""

from dataclasses import replace

import pytest
import torch

from linear_attention import ERROR_LIMIT, backend_run, make_work
from paceline.attention.linear.shape import GDN, MAMBA2, STATE
from paceline.attention.mixers import load_state_backend
from paceline.kernels.gated_norm import Gate, gated_rows_reference

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


@pytest.mark.parametrize("reqs", [1, 3, 24])
@torch.inference_mode()
def test_a_gate_beside_states_is_one_behind_them_at_real_widths(reqs: int) -> None:
    """Of a decode, whose states are the same numbers."""
    work = make_work(MAMBA2, "decode", reqs, 1, torch.device("cuda"))
    backend = load_state_backend("triton", kind=MAMBA2)
    plan = backend.plan(work.view, work.group, backend.make_buffers(work.limits), is_round=False)
    [layer, again] = (
        replace(work.layers[0], parts={n: part.clone() for n, part in work.layers[0].parts.items()})
        for _ in range(2)
    )
    size = layer.parts[STATE].shape[1] * layer.parts[STATE].shape[3]
    z = torch.randn(reqs, size + 8, device="cuda").bfloat16()[:, :size]
    gate = Gate(z, torch.randn(size, device="cuda").bfloat16())
    wanted = gated_rows_reference(backend.extend(work.inputs, layer, plan).flatten(1), gate)
    found = backend.extend_gated(work.inputs, gate, again, plan)
    assert found is not None
    for mine, theirs in zip((found.rows, found.squares.sum(1, keepdim=True)), wanted, strict=True):
        apart = (mine.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert apart <= ERROR_LIMIT
    for name, part in layer.parts.items():
        assert torch.equal(part, again.parts[name])
