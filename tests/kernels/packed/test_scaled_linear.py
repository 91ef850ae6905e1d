"""scaled_linear: what a library multiplies are the codes of its definition, in one order."""

import pytest
import torch
from packed_cases import KINDS, random_weight, relative

from paceline.core.errors import KernelArgumentError
from paceline.kernels.packed_weight import FP8, Packing, encode
from paceline.kernels.scaled_linear import (
    fits_scaled,
    round_rows,
    round_rows_reference,
    scaled_linear,
    scaled_linear_reference,
)

pytest.importorskip("triton")

PACKING = Packing(FP8, None, False, torch.float32, rounds_inputs=True)


def inputs(tokens: int, columns: int) -> torch.Tensor:
    """Of which one row is tiny and one is zeros."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
    x[1] *= 1e-6
    x[2] = 0.0
    return x.bfloat16()


@pytest.mark.parametrize("columns", [256, 200])
def test_rows_are_rounded_as_defined_in_the_order_of_packed_columns(columns: int) -> None:
    x = inputs(3, columns)
    codes, scale = round_rows(x)  # the CPU's
    wanted, scales = round_rows_reference(x)
    assert torch.equal(scale, scales)
    assert relative(wanted.float() * scales, x.double()) < 0.03  # the page's error of fp8
    # A product of codes in two orders is one with numbers where the orders are the same.
    weight, numbers = random_weight(16, columns, PACKING)
    product = (codes.float() * scale) @ (weight.words.view(codes.dtype).float() * weight.scale).T
    exact = (wanted.double() * scales.double()) @ numbers.T
    torch.testing.assert_close(product.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("columns", [256, 200])
def test_the_kernel_puts_codes_and_scales_where_the_definition_does(columns: int) -> None:
    from paceline.kernels._triton.scaled_linear import launch_round_rows

    # Numbers that are codes: the interpreter rounds others wrongly.
    codes = torch.randint(0, 0x7F, (3, columns), generator=torch.Generator().manual_seed(0))
    x = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    x[:, 17] = -448.0
    x[1], x[2] = x[1] / 1024, 0.0
    wanted, scale = round_rows(x.bfloat16())
    ours, our_scale = torch.empty_like(wanted), torch.empty_like(scale)
    launch_round_rows(x.bfloat16(), ours.view(torch.uint8), our_scale)
    assert torch.equal(our_scale, scale)
    assert torch.equal(ours.float(), wanted.float())


def test_products_equal_those_with_what_codes_stand_for() -> None:
    numbers = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    weight, bias = encode(numbers, PACKING), torch.arange(32).bfloat16()
    x = inputs(65, 256)
    ours = scaled_linear(x, weight, bias, PACKING)
    wanted = scaled_linear_reference(x, weight, bias, PACKING)
    assert relative(ours, wanted.double()) < 2.3e-3
    assert relative(ours, x.double() @ numbers.T.double() + bias.double()) < 0.05


def test_operands_that_do_not_fit_are_named() -> None:
    weight, _ = random_weight(32, 256, PACKING)
    x = inputs(65, 256)
    assert not fits_scaled(x, weight, PACKING)  # on a CPU
    with pytest.raises(
        KernelArgumentError, match=r"x must be bfloat16 \[tokens, columns\], contig"
    ):
        scaled_linear(x.float(), weight, None, PACKING)
    grouped, _ = random_weight(32, 256, KINDS["fp8-g128"])
    with pytest.raises(KernelArgumentError, match="weight must be fp8, a scale for a row"):
        scaled_linear(x, grouped, None, KINDS["fp8-g128"])
    with pytest.raises(KernelArgumentError, match=r"bias must be torch\.bfloat16 \[32\]"):
        scaled_linear(x, weight, torch.zeros(32), PACKING)
