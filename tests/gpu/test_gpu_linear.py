"""skinny_linear, compiled, at the shapes of real layers and at the edges of its tiles."""

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.linear import gated_linear, linear
from paceline.kernels.skinny_linear import MAX_TOKENS, arrival_counters, fits_skinny, skinny_linear

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TOKENS = pytest.mark.parametrize("tokens", [1, 2, 16, 33, MAX_TOKENS])


def operands(tokens: int, rows: int, inner: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias in bfloat16, of a product whose results are about 1."""
    rng = torch.Generator("cuda").manual_seed(tokens + rows)
    x, weight, bias = (
        torch.randn(shape, generator=rng, device="cuda")
        for shape in ((tokens, inner), (rows, inner), (rows,))
    )
    return x.bfloat16(), (weight / inner**0.5).bfloat16(), bias.bfloat16()


def assert_exact(actual: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), exact, rtol=2**-7, atol=2e-2)


@TOKENS
@pytest.mark.parametrize(
    ("rows", "inner"),
    [(6144, 4096), (4096, 14336), (1000, 1152), (129, 256), (1, 2048)],
    ids=["qkv", "down", "odd", "narrow", "one feature"],
)
def test_products_equal_float64(tokens: int, rows: int, inner: int) -> None:
    x, weight, bias = operands(tokens, rows, inner)
    assert fits_skinny(x, weight)
    counters = arrival_counters(rows, device=x.device)
    exact = x.double() @ weight.double().T + bias.double()
    for _ in range(2):
        assert_exact(linear(x, weight, bias, counters=counters), exact)
        assert not counters.any()


@TOKENS
@pytest.mark.parametrize(("rows", "inner"), [(2 * 14336, 4096), (2 * 72, 128), (2, 256)])
def test_gated_products_equal_float64(tokens: int, rows: int, inner: int) -> None:
    x, weight, bias = operands(tokens, rows, inner)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        gated_linear(x, weight, bias, "silu").double(), exact, rtol=2**-5, atol=5e-2
    )


@TOKENS
def test_a_replayed_chain_never_reads_before_its_input_is_written(tokens: int) -> None:
    """Products that start while the one before drains, each reading what that one wrote, their
    parts and counters used again and again: the same bits as with a pause behind each."""
    x, weight, bias = operands(tokens, 1024, 1024)
    counters = arrival_counters(1024, device=x.device)

    def chain(pause: Callable[[], None]) -> torch.Tensor:
        out = x
        for _ in range(40):
            for _ in range(2):
                out = skinny_linear(out, weight, bias, counters=counters)
                pause()
            out = out * 0.5  # a kernel of torch, which starts when all before it have ended
            pause()
        return out

    wanted = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain(lambda: None)
    for _ in range(5):
        replayed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(replayed, wanted)
    assert not counters.any()
