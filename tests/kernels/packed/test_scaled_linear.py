"""scaled_linear and skinny_scaled_linear: what is multiplied are the codes of their definition, in
one order."""

from dataclasses import replace

import pytest
import torch
from packed_cases import KINDS, random_weight, relative

from paceline.core.errors import KernelArgumentError
from paceline.kernels.packed_weight import CHUNK, FP8, PackedWeight, Packing, encode
from paceline.kernels.scaled_linear import (
    fits_scaled,
    round_rows,
    round_rows_reference,
    scaled_linear,
    scaled_linear_reference,
)
from paceline.kernels.skinny_linear import arrival_counters
from paceline.kernels.skinny_scaled_linear import (
    fits_skinny_scaled,
    skinny_scaled_linear,
    skinny_scaled_linear_reference,
)
from paceline.kernels.stand_in import StandIn

pytest.importorskip("triton")

PACKING = Packing(FP8, None, False, torch.float32, rounds_inputs=True)


def inputs(tokens: int, columns: int) -> torch.Tensor:
    """Of which one row is tiny and one is zeros."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
    x[1] *= 1e-6
    x[2] = 0.0
    return x.bfloat16()


def of_codes(tokens: int, columns: int) -> torch.Tensor:
    """Numbers that are codes: the interpreter rounds others wrongly."""
    codes = torch.randint(0, 0x7F, (tokens, columns), generator=torch.Generator().manual_seed(0))
    x = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    x[:, 17::128] = -448.0
    x[1], x[2] = x[1] / 1024, 0.0
    return x.bfloat16()


@pytest.mark.parametrize("group", [None, CHUNK])
@pytest.mark.parametrize("columns", [256, 200])
def test_rows_are_rounded_as_defined_in_the_order_of_packed_columns(
    columns: int, group: int | None
) -> None:
    x = inputs(3, columns)
    codes, scale = (part[:3] for part in round_rows(x, group))  # the CPU's
    wanted, scales = round_rows_reference(x, group)
    assert torch.equal(scale, scales)
    by_column = scales.repeat_interleave(group or columns, dim=1)
    assert relative(wanted.float() * by_column[:, :columns], x.double()) < 0.03  # the page's error
    # A product of codes in two orders is one with numbers where the orders are the same.
    weight, numbers = random_weight(16, columns, PACKING)
    padded = scales.repeat_interleave(group or codes.shape[1], dim=1)
    product = (codes.float() * padded) @ (weight.words.view(codes.dtype).float() * weight.scale).T
    exact = (wanted.double() * by_column[:, :columns].double()) @ numbers.T
    torch.testing.assert_close(product.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group", [None, CHUNK])
@pytest.mark.parametrize("columns", [256, 200])
def test_the_kernel_puts_codes_and_scales_where_the_definition_does(
    columns: int, group: int | None
) -> None:
    from paceline.kernels._triton.scaled_linear import launch_round_rows

    x = of_codes(3, columns)
    wanted, scale = round_rows(x, group)
    ours, our_scale = torch.empty_like(wanted), torch.empty_like(scale.t())
    grouped = group is not None
    launch_round_rows(x, ours.view(torch.uint8), our_scale, is_grouped=grouped)
    assert torch.equal(our_scale.t()[:3], scale[:3])
    assert torch.equal(ours[:3].float(), wanted[:3].float())


def test_products_equal_those_with_what_codes_stand_for() -> None:
    numbers = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    weight, bias = encode(numbers, PACKING), torch.arange(32).bfloat16()
    x = inputs(65, 256)
    ours = scaled_linear(x, weight, bias, PACKING)
    wanted = scaled_linear_reference(x, weight, bias, PACKING)
    assert relative(ours, wanted.double()) < 2.3e-3
    assert relative(ours, x.double() @ numbers.T.double() + bias.double()) < 0.05


@pytest.mark.parametrize("activation", [None, "silu"])
def test_few_rows_equal_those_with_what_codes_stand_for(activation: str | None) -> None:
    """Of tiles that are partial, of split columns, and of a last chunk that is partial."""
    rows, columns = 2 * 72, 2 * 128 - 56
    weight, _ = random_weight(rows, columns, PACKING)
    x, bias = of_codes(5, columns) / 512, torch.arange(rows).bfloat16() / rows
    counters = arrival_counters(rows, device=x.device)
    for _ in range(2):
        ours = skinny_scaled_linear(
            x, weight, bias, PACKING, activation=activation, counters=counters
        )
        assert not counters.any()
    wanted = skinny_scaled_linear_reference(x, weight, bias, PACKING, activation)
    # The interpreter cuts bfloat16 off, which an activation does thrice.
    assert relative(ours, wanted.double()) < (4.6e-3 if activation is None else 2e-2)


@pytest.mark.parametrize(
    ("shared_bytes", "activation", "stages"),
    [(227 << 10, None, 8), (227 << 10, "silu", 8), (99 << 10, None, 6), (99 << 10, "silu", 4)],
)
def test_chunks_on_their_way_are_no_more_than_shared_memory_holds(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int, activation: str | None, stages: int
) -> None:
    """Of 64 tokens a chunk is 16 KiB, and 24 of gates with ups.  A consumer GPU has 99."""
    from paceline.kernels._triton import skinny_scaled_linear as kernel

    launched = list[int]()
    monkeypatch.setattr(kernel, "shared_memory_bytes", lambda device: shared_bytes)
    monkeypatch.setattr(
        kernel, "launch", lambda *args, num_stages, **options: launched.append(num_stages)
    )
    weight, _ = random_weight(128, 128, PACKING)
    skinny_scaled_linear(inputs(64, 128), weight, None, PACKING, activation=activation)
    assert launched == [stages]


def test_operands_that_do_not_fit_are_named() -> None:
    weight, _ = random_weight(32, 256, PACKING)
    x = inputs(65, 256)
    assert not fits_scaled(x, weight, PACKING)  # on a CPU
    assert not fits_skinny_scaled(x[:40], PACKING)
    with pytest.raises(KernelArgumentError, match=r"x must be \[1\.\.64, columns\]"):
        skinny_scaled_linear(x, weight, None, PACKING)
    with pytest.raises(
        KernelArgumentError, match=r"x must be bfloat16 \[tokens, columns\], contig"
    ):
        scaled_linear(x.float(), weight, None, PACKING)
    other, _ = random_weight(32, 256, KINDS["int8-row"])
    with pytest.raises(
        KernelArgumentError, match="weight must be fp8, a scale for a row or a block, a"
    ):
        scaled_linear(x, other, None, KINDS["int8-row"])
    with pytest.raises(KernelArgumentError, match="weight must be fp8, a scale for a row, as many"):
        skinny_scaled_linear(x[:9], other, None, KINDS["int8-row"])
    with pytest.raises(KernelArgumentError, match=r"bias must be torch\.bfloat16 \[32\]"):
        scaled_linear(x, weight, torch.zeros(32), PACKING)


@pytest.mark.parametrize(
    ("gpu", "rows", "groups"),
    [(None, False, False), ((8, 9), False, False), ((9, 0), True, True), ((10, 0), True, False)],
)
def test_the_gpu_that_is_planned_for_multiplies_codes(
    gpu: tuple[int, int] | None, rows: bool, groups: bool
) -> None:
    meta = torch.device("meta")
    x = torch.empty(65, 512, dtype=torch.bfloat16, device=meta)
    words = torch.empty(128, 128, dtype=torch.int32, device=meta)
    blocks = replace(PACKING, group=CHUNK, shared_rows=CHUNK)
    with StandIn("cuda", None, gpu):
        assert fits_scaled(x, PackedWeight(words, x.new_empty(128, 1), None), PACKING) == rows
        assert fits_scaled(x, PackedWeight(words, x.new_empty(128, 4), None), blocks) == groups
        assert not fits_scaled(x, PackedWeight(words, x.new_empty(128, 3), None), blocks)
        few = [fits_skinny_scaled(x[:tokens], PACKING) for tokens in (32, 33, 64, 65)]
        assert few == [False, rows, rows, False]
        assert not fits_skinny_scaled(x[:64], blocks)
