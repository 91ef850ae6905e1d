"""rms_norm and add_rms_norm: the op and its Triton kernel against transformers' modules.

Triton's interpreter truncates float32 to bfloat16 where the compiled kernel rounds, one ulp per
conversion; benchmarks/kernels.py holds the compiled kernel to the tighter bound.
"""

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline.core.errors import KernelArgumentError
from paceline.kernels.rms_norm import (
    RowScale,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def theirs(weight: Tensor, unit_offset: bool) -> torch.nn.Module:
    """transformers' Llama norm, or Gemma 3's for unit_offset, with this weight."""
    kind = Gemma3RMSNorm if unit_offset else LlamaRMSNorm
    module = kind(weight.shape[0], eps=EPS).to(weight.dtype)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def operands(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(9, dim, generator=generator) * 3.0
    return x.to(dtype), torch.randn(dim, generator=generator).to(dtype)


def run_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    unit_offset: bool,
    *,
    wide: bool = False,
    scale: RowScale | None = None,
) -> Tensor:
    from paceline.kernels._triton.rms_norm import launch_rms_norm

    out = torch.full_like(x, float("nan"))
    launch_rms_norm(
        x, residual, weight, eps=EPS, unit_offset=unit_offset, wide=wide, out=out, scale=scale
    )
    return out


def assert_within_ulps(actual: Tensor, expected: Tensor, ulps: int) -> None:
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=ulps * eps, atol=1e-6)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op_and_reference_round_as_transformers(dtype: torch.dtype, unit_offset: bool) -> None:
    x, weight = operands(dtype, 200)
    expected = theirs(weight, unit_offset)(x)
    reference = rms_norm_reference(x, weight, EPS, unit_offset=unit_offset)
    torch.testing.assert_close(reference, expected, rtol=0.0, atol=0.0)
    actual = rms_norm(x, weight, EPS, unit_offset=unit_offset)
    assert_within_ulps(actual, expected, 2)
    assert (actual != expected).float().mean().item() < (0.5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_rounds_as_transformers(dtype: torch.dtype, unit_offset: bool) -> None:
    x, weight = operands(dtype, 200)
    actual = run_triton(x, None, weight, unit_offset)
    assert_within_ulps(actual, theirs(weight, unit_offset)(x), 4)
    assert not torch.allclose(actual.float(), theirs(weight, not unit_offset)(x).float(), atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wide_product_rounds_as_gpt_oss(dtype: torch.dtype) -> None:
    x, weight = operands(dtype, 200)
    module = GptOssRMSNorm(200, eps=EPS).to(dtype)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    expected, narrow = module(x), theirs(weight, False)(x)
    reference = rms_norm_reference(x, weight, EPS, wide=True)
    torch.testing.assert_close(reference, expected, rtol=0.0, atol=0.0)
    actual = rms_norm(x, weight, EPS, wide=True)
    assert (actual != expected).float().mean().item() < (0.5 if dtype == torch.float32 else 0.01)
    assert_within_ulps(run_triton(x, None, weight, False, wide=True), expected, 4)
    total, residual = add_rms_norm_reference(x, x, weight, EPS, wide=True), x.clone()
    assert_within_ulps(add_rms_norm(x, residual, weight, EPS, wide=True), total[0], 2)
    if dtype != torch.float32:
        assert (narrow != expected).float().mean().item() > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_is_summed_in_the_model_dtype(dtype: torch.dtype) -> None:
    x, weight = operands(dtype, 72)
    residual = operands(dtype, 72)[0].flip(0) * 7.0
    expected, total = add_rms_norm_reference(x, residual, weight, EPS)
    mine, interpreted = residual.clone(), residual.clone()
    assert_within_ulps(add_rms_norm(x, mine, weight, EPS), expected, 2)
    assert_within_ulps(run_triton(x, interpreted, weight, False), expected, 4)
    assert torch.equal(mine, total)
    assert_within_ulps(interpreted, total, 1)


# Rows of 200 numbers, several of a program, with fewer sums and with more; one row of a program.
@pytest.mark.parametrize(("dim", "spare"), [(200, 0), (200, 250), (2000, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_added_may_have_a_scale(dtype: torch.dtype, dim: int, spare: int) -> None:
    """That of rows of 50 numbers, of which a product made them."""
    x, weight = operands(dtype, dim)
    residual, given = x.flip(0), x.clone()
    rows = torch.randn(9, 50, generator=torch.Generator().manual_seed(1)) * 4.0
    squares = torch.nn.functional.pad(rows.square(), (spare, 0))
    scale = RowScale(squares, 50, 0.5)
    factors = torch.rsqrt(rows.double().square().mean(1, keepdim=True) + 0.5)
    wanted, total = add_rms_norm_reference(x, residual, weight, EPS, scale=scale)
    assert_within_ulps(total, (residual.double() + x.double() * factors).to(dtype), 1)
    mine, interpreted = residual.clone(), residual.clone()
    assert_within_ulps(add_rms_norm(x, mine, weight, EPS, scale=scale), wanted, 4)
    assert_within_ulps(run_triton(x, interpreted, weight, False, scale=scale), wanted, 4)
    for stream in (mine, interpreted):
        assert_within_ulps(stream, total, 1)
    assert torch.equal(x, given)


def test_strided_heads_are_normalised_in_place() -> None:
    fused = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(3))
    weight = torch.linspace(0.5, 1.5, 24)
    for launch in (
        lambda view: rms_norm(view, weight, EPS, out=view),
        lambda view: launch_in_place(view, weight),
    ):
        work = fused.clone()
        launch(work[:, 1:4])
        expected = rms_norm_reference(fused[:, 1:4], weight, EPS)
        torch.testing.assert_close(work[:, 1:4], expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(work[:, 4:], fused[:, 4:])
        assert torch.equal(work[:, :1], fused[:, :1])


def launch_in_place(view: Tensor, weight: Tensor) -> None:
    from paceline.kernels._triton.rms_norm import launch_rms_norm

    launch_rms_norm(view, None, weight, eps=EPS, unit_offset=False, wide=False, out=view)


def test_step_without_tokens_is_empty() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)


def test_bad_argument_is_named_with_what_was_expected() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(KernelArgumentError, match=r"x must be \[tokens, dim\] or .*float32 \[1, 2"):
        rms_norm(torch.ones(8, 2).T[None], weight, EPS)
    with pytest.raises(KernelArgumentError, match=r"weight must be torch.float32 \[8\] on cpu"):
        rms_norm(x, weight.half(), EPS)
    with pytest.raises(KernelArgumentError, match=r"residual must be .*\[2, 8\]"):
        add_rms_norm(x, torch.ones(3, 8), weight, EPS)
    for squares in (torch.ones(3, 2), torch.ones(2, 2).double(), torch.ones(4, 2).T[:, ::2]):
        with pytest.raises(KernelArgumentError, match=r"squares must be contiguous float32 \[2, "):
            add_rms_norm(x, x.clone(), weight, EPS, scale=RowScale(squares, 8, EPS))
    with pytest.raises(KernelArgumentError, match=r"out must be .*give it the shape"):
        rms_norm(x, weight, EPS, out=torch.ones(3, 8))
