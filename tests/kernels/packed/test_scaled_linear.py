"""scaled_linear and skinny_scaled_linear: what is multiplied are the codes of their definition, in
one order."""

import pytest
import torch
from packed_cases import KINDS, random_weight, relative

from paceline.core.errors import KernelArgumentError
from paceline.kernels.packed_weight import FP8, Packing, encode
from paceline.kernels.round_rows import CODE, round_rows, round_rows_reference
from paceline.kernels.scaled_linear import (
    fits_scaled,
    scaled_linear,
    scaled_linear_reference,
)
from paceline.kernels.skinny_linear import arrival_counters
from paceline.kernels.skinny_scaled_linear import (
    fits_skinny_scaled,
    skinny_scaled_linear,
    skinny_scaled_linear_reference,
)

pytest.importorskip("triton")

PACKING = Packing(FP8, None, False, torch.float32, rounds_inputs=True)
GROUPED = KINDS["fp8-g128"]


def inputs(tokens: int, columns: int) -> torch.Tensor:
    """Of which one row is tiny and one is zeros."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
    x[1] *= 1e-6
    x[2] = 0.0
    return x.bfloat16()


def of_codes(tokens: int, columns: int) -> torch.Tensor:
    """Numbers that are codes: the interpreter rounds others wrongly."""
    codes = torch.randint(0, 0x7F, (tokens, columns), generator=torch.Generator().manual_seed(0))
    x = codes.to(torch.uint8).view(CODE).float()
    x[:, 17::128] = -448.0
    x[1], x[2] = x[1] / 1024, 0.0
    return x.bfloat16()


@pytest.mark.parametrize("packing", [PACKING, GROUPED], ids=["rows", "groups"])
@pytest.mark.parametrize("columns", [256, 200])
def test_rows_are_rounded_as_defined_in_the_order_of_packed_columns(
    columns: int, packing: Packing
) -> None:
    x = inputs(3, columns)
    codes, scale = round_rows(x, packing.group)  # the CPU's
    assert scale.shape == (packing.num_groups(columns), 4)
    codes, scale = codes[:3], scale[:, :3].T
    wanted, scales = round_rows_reference(x, packing.group)
    assert torch.equal(scale, scales)

    def numbers(codes: torch.Tensor) -> torch.Tensor:
        return codes.double() * scales.double().repeat_interleave(128, dim=1)[:, : codes.shape[1]]

    if packing.group is None:
        scales = scales.expand(3, 2)
    assert relative(numbers(wanted), x.double()) < 0.03  # the page's error of fp8
    # A product of codes in two orders is one with numbers where the orders are the same.
    weight, exact = random_weight(16, columns, PACKING)
    product = numbers(codes) @ (weight.words.view(codes.dtype).double() * weight.scale).T
    torch.testing.assert_close(product, numbers(wanted) @ exact.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("columns", [256, 200])
def test_the_kernel_puts_codes_and_scales_where_the_definition_does(
    columns: int, group: int | None
) -> None:
    from paceline.kernels._triton.round_rows import launch_round_rows

    x = of_codes(3, columns)
    wanted, scale = round_rows(x, group)
    ours, our_scale = torch.empty_like(wanted), torch.empty_like(scale)
    launch_round_rows(x, ours.view(torch.uint8), our_scale)
    assert torch.equal(our_scale[:, :3], scale[:, :3])
    assert torch.equal(ours[:3].float(), wanted[:3].float())


def test_products_equal_those_with_what_codes_stand_for() -> None:
    numbers = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    weight, bias = encode(numbers, PACKING), torch.arange(32).bfloat16()
    x = inputs(65, 256)
    ours = scaled_linear(x, weight, bias, PACKING)
    wanted = scaled_linear_reference(x, weight, bias, PACKING)
    assert relative(ours, wanted.double()) < 2.3e-3
    assert relative(ours, x.double() @ numbers.T.double() + bias.double()) < 0.05


@pytest.mark.parametrize("packing", [PACKING, GROUPED], ids=["rows", "groups"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_few_rows_equal_those_with_what_codes_stand_for(
    activation: str | None, packing: Packing
) -> None:
    """Of tiles that are partial, of split columns, and of a last chunk that is partial."""
    rows, columns = 2 * 72, 2 * 128 - 56
    weight, _ = random_weight(rows, columns, packing)
    x, bias = of_codes(5, columns) / 512, torch.arange(rows).bfloat16() / rows
    counters = arrival_counters(rows, device=x.device)
    how = {"activation": activation, "counters": counters}
    for _ in range(2):
        ours = skinny_scaled_linear(x, weight, bias, packing, **how)
        assert not counters.any()
    wanted = skinny_scaled_linear_reference(x, weight, bias, packing, activation)
    # The interpreter cuts bfloat16 off, which an activation does thrice.
    assert relative(ours, wanted.double()) < (4.6e-3 if activation is None else 2e-2)


def test_operands_that_do_not_fit_are_named() -> None:
    weight, _ = random_weight(32, 256, PACKING)
    x = inputs(65, 256)
    assert not fits_scaled(x, weight, PACKING)  # on a CPU
    assert not fits_skinny_scaled(x[:8], PACKING)
    with pytest.raises(
        KernelArgumentError, match=r"x must be bfloat16 \[tokens, columns\], contig"
    ):
        scaled_linear(x.float(), weight, None, PACKING)
    grouped, _ = random_weight(32, 256, KINDS["int8-g32"])
    for product in (scaled_linear, skinny_scaled_linear):
        with pytest.raises(KernelArgumentError, match="weight must be fp8, a scale for a row or"):
            product(x, grouped, None, KINDS["int8-g32"])
    with pytest.raises(KernelArgumentError, match="x must be 1 to 64 tokens"):
        skinny_scaled_linear(x, weight, None, PACKING)
    with pytest.raises(KernelArgumentError, match=r"bias must be torch\.bfloat16 \[32\]"):
        scaled_linear(x, weight, torch.zeros(32), PACKING)
