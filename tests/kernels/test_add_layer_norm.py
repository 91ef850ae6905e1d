"""add_layer_norm: the op and its Triton kernel against torch's LayerNorm of the sum."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.errors import KernelArgumentError
from paceline.kernels.add_layer_norm import add_layer_norm

Norm = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def by_triton(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float):
    from paceline.kernels._triton.add_layer_norm import launch_add_layer_norm

    out = x.new_full(x.shape, float("nan"))
    launch_add_layer_norm(x, residual, weight, bias, eps, out)
    return out


@pytest.mark.parametrize("run", [add_layer_norm, by_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "has_bias"), [(200, True), (768, False)])
def test_the_sum_is_rounded_and_then_normalised(
    run: Norm, dtype: torch.dtype, dim: int, has_bias: bool
) -> None:
    """Rows far from zero, whose variance no difference of squares would find."""
    generator = torch.Generator().manual_seed(dim)
    fused, residual = (torch.randn(5, 2 * dim, generator=generator).to(dtype) for _ in range(2))
    x, residual = fused[:, dim:] + 40.0, residual[:, :dim]
    weight, bias = torch.randn(2, dim, generator=generator).to(dtype)
    wanted = F.layer_norm(x + residual, (dim,), weight, bias if has_bias else None, 1e-6)
    before = x.clone(), residual.clone()
    actual = run(x, residual, weight, bias if has_bias else None, 1e-6)
    # Triton's interpreter truncates float32 to bfloat16 where the compiled kernel rounds.
    atol = 2e-5 if dtype is torch.float32 else 0.3 if run is by_triton else 0.02
    torch.testing.assert_close(actual, wanted, rtol=2 * torch.finfo(dtype).eps, atol=atol)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_bad_argument_is_named_with_what_was_expected() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(
        KernelArgumentError, match=r"residual must be torch.float32 \[tokens, dim\]"
    ):
        add_layer_norm(x, torch.ones(3, 8), weight, None, 1e-6)
    with pytest.raises(KernelArgumentError, match=r"bias must be torch.float32 \[8\]"):
        add_layer_norm(x, x, weight, torch.ones(7), 1e-6)
