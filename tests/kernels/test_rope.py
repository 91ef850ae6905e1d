"""rope_inplace: the op and its Triton kernel against transformers."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.core.errors import KernelArgumentError
from paceline.kernels.rope import rope_inplace, rope_reference

DTYPES = [torch.float32, torch.bfloat16]


def table(rotary_dim: int) -> Tensor:
    """[64, rotary_dim] float32 cosines then sines, base 100."""
    frequencies = 100.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    angles = torch.arange(64, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def fused_row(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    """A fused [5 tokens, 3 Q + 2 K + 2 V heads, dim] row and its positions, repeats included."""
    generator = torch.Generator().manual_seed(dim)
    fused = torch.randn(5, 7, dim, generator=generator).to(dtype)
    return fused, torch.tensor([3, 0, 63, 3, 17])


def run_triton(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    from paceline.kernels._triton.rope import launch_rope

    launch_rope(q, k, cos_sin, positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_transformers_rotation(dtype: torch.dtype) -> None:
    fused, positions = fused_row(dtype, 24)
    cos = torch.cat((table(24)[positions, :12],) * 2, dim=-1).to(dtype)[None]
    sin = torch.cat((table(24)[positions, 12:],) * 2, dim=-1).to(dtype)[None]
    heads_first = fused.transpose(0, 1)[None]
    q, k = apply_rotary_pos_emb(heads_first[:, :3], heads_first[:, 3:5], cos, sin)
    # They round cos, sin, two products and the sum; a pair's length bounds each rounding.
    length = fused.float().abs().max().item() * 2.0**0.5
    atol = 2.5 * torch.finfo(dtype).eps * length
    mine = rope_reference(fused, table(24), positions)
    torch.testing.assert_close(mine[:, :3], q[0].transpose(0, 1), rtol=0.0, atol=atol)
    torch.testing.assert_close(mine[:, 3:5], k[0].transpose(0, 1), rtol=0.0, atol=atol)


@pytest.mark.parametrize("run", [rope_inplace, run_triton], ids=["op", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(24, 24), (32, 16)])
@pytest.mark.parametrize("k_start", [3, 4], ids=["k-follows-q", "k-apart"])
def test_q_and_k_are_rotated_in_place_and_nothing_else(
    run: object, dtype: torch.dtype, dim: int, rotary_dim: int, k_start: int
) -> None:
    fused, positions = fused_row(dtype, dim)
    work = fused.clone()
    run(work[:, :3], work[:, k_start : k_start + 2], table(rotary_dim), positions)
    expected = fused.clone()
    rotated = rope_reference(fused, table(rotary_dim), positions)
    expected[:, :3] = rotated[:, :3]
    expected[:, k_start : k_start + 2] = rotated[:, k_start : k_start + 2]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(work, expected, rtol=eps, atol=2e-7)
    late = rope_reference(fused, table(rotary_dim), (positions + 1) % 64)
    assert not torch.allclose(work[:, :3].float(), late[:, :3].float(), atol=0.1)


def test_bad_argument_is_named_with_what_was_expected() -> None:
    fused, positions = fused_row(torch.float32, 24)
    q, k = fused[:, :3], fused[:, 3:5]
    with pytest.raises(KernelArgumentError, match=r"q must be \[tokens, heads, dim\]"):
        rope_inplace(q.flatten(1), k, table(24), positions)
    with pytest.raises(KernelArgumentError, match=r"k must be torch.float32 \[5, kv_heads, 24\]"):
        rope_inplace(q, k[:3], table(24), positions)
    with pytest.raises(KernelArgumentError, match=r"cos_sin must be contiguous float32 \[max_pos"):
        rope_inplace(q, k, table(24).double(), positions)
    with pytest.raises(KernelArgumentError, match=r"positions must be int64 \[5\]"):
        rope_inplace(q, k, table(24), positions.int())
