"""head_products: the operation and its Triton kernel against their definition in float64."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.head_products import head_products, head_products_reference

Run = Callable[[Tensor, Tensor, Tensor], None]
NAN = float("nan")


def run_triton(x: Tensor, weight: Tensor, out: Tensor) -> None:
    from paceline.kernels._triton.head_products import launch_head_products

    launch_head_products(x, weight, out)


def matrices(heads: int, inner: int, columns: int, *, transposed: bool) -> Tensor:
    """[heads, inner, columns] bfloat16, as the halves of one tensor are: in rows, or in columns."""
    generator = torch.Generator().manual_seed(inner)
    shape = (heads, columns, inner) if transposed else (heads, inner, columns)
    weight = torch.randn(shape, generator=generator).mul_(inner**-0.5).bfloat16()
    return weight.mT if transposed else weight


def wanted(x: Tensor, weight: Tensor) -> Tensor:
    return head_products_reference(x.double(), weight.double())


@pytest.mark.parametrize("run", [head_products, run_triton], ids=["op", "triton"])
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize(
    ("inner", "columns", "transposed"),
    [(24, 200, False), (200, 24, True), (512, 40, True)],
    ids=["keys", "values", "long"],
)
def test_each_head_has_its_matrix_and_nothing_else_is_written(
    run: Run, tokens: int, inner: int, columns: int, transposed: bool
) -> None:
    heads = 3
    generator = torch.Generator().manual_seed(tokens)
    row = torch.randn(tokens, heads, inner + 8, generator=generator).bfloat16()
    weight, x = matrices(heads, inner, columns, transposed=transposed), row[..., :inner]
    made = torch.full((tokens, heads, columns + 16), NAN, dtype=torch.bfloat16)
    run(x, weight, made[..., :columns])
    exact = wanted(x, weight)
    torch.testing.assert_close(made[..., :columns].double(), exact, rtol=0.01, atol=0.02)
    assert made[..., columns:].isnan().all()


def test_a_head_that_is_not_finite_touches_no_other() -> None:
    weight = matrices(4, 16, 32, transposed=False)
    x, found = torch.ones(2, 4, 16).bfloat16(), torch.zeros(2, 4, 32).bfloat16()
    x[1, 2] = NAN
    run_triton(x, weight, found)
    assert found[1, 2].isnan().all()
    found[1, 2] = 0.0
    assert found.isfinite().all()


def test_bad_operands_are_named() -> None:
    x, weight = torch.zeros(2, 3, 8), torch.zeros(3, 8, 4)
    out = torch.zeros(2, 3, 4)
    for (a, b, c), text in (
        ((x[0], weight, out), "x must be [tokens, heads, inner] with a contiguous last"),
        ((x.mT, weight, out), "x must be [tokens, heads, inner] with a contiguous last"),
        ((x, weight[:2], out), "weight must be torch.float32 [3, 8, columns] on cpu"),
        ((x, weight.half(), out), "weight must be torch.float32 [3, 8, columns] on cpu"),
        ((x, torch.zeros(3, 16, 8)[:, ::2, ::2], out), "weight must be torch.float32 [3, 8, col"),
        ((x, weight, out[:1]), "out must be torch.float32 [2, 3, 4] on cpu"),
        ((x, weight, torch.zeros(2, 3, 8)[..., ::2]), "out must be torch.float32 [2, 3, 4] on cpu"),
    ):
        with pytest.raises(KernelArgumentError, match=re.escape(text)):
            head_products(a, b, c)
