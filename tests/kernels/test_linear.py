"""linear against float64, on both sides of the switch between library paths."""

import pytest
import torch
from torch import Tensor

from paceline.kernels.linear import linear, linear_reference
from paceline.runner.recorded import RecordedGraph

TOKENS = [0, 1, 2, 3, 4, 7, 16, 33, 64]
IN, OUT = 72, 40


def operands(tokens: int, dtype: torch.dtype, order: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, a slice of a wider row; the weight, stored by rows or by columns; the bias."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, IN + 8, generator=generator).to(dtype)[:, 4:-4]
    weight = torch.randn(OUT, IN, generator=generator).to(dtype)
    if order == "columns":
        weight = weight.t().contiguous().t()
    return x, weight, torch.randn(OUT, generator=generator).to(dtype)


def assert_within_roundings(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """float32 accumulation rounds once a term; the result is rounded once to its dtype."""
    exact = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().t() + 8.0
    limit = IN * torch.finfo(torch.float32).eps * terms
    limit += torch.finfo(actual.dtype).eps * exact.abs()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("function", [linear, linear_reference])
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_equals_float64(
    tokens: int, dtype: torch.dtype, has_bias: bool, order: str, function: object
) -> None:
    x, weight, bias = operands(tokens, dtype, order)
    used = bias if has_bias else None
    kept = [tensor.clone() for tensor in (x, weight, bias)]
    out = function(x, weight, used)
    assert out.dtype is dtype
    assert_within_roundings(out, x, weight, used)
    assert all(map(torch.equal, kept, (x, weight, bias)))  # nothing is mutated


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("tokens", [2, 3, 16])
def test_a_recorded_linear_follows_its_input(tokens: int, order: str) -> None:
    x, weight, bias = operands(tokens, torch.float32, order)
    out = torch.zeros(tokens, OUT)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: out.copy_(linear(x, weight, bias)))
    assert_within_roundings(out, x, weight, bias)
    x.mul_(-3.0)
    graph.replay()
    assert_within_roundings(out, x, weight, bias)
