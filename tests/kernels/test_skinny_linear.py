"""skinny_linear through Triton's interpreter against float64."""

import pytest
import torch

from paceline.core.errors import KernelArgumentError
from paceline.kernels.act_and_mul import ACTIVATIONS
from paceline.kernels.skinny_linear import (
    arrival_counters,
    fits_skinny,
    skinny_linear,
    skinny_linear_reference,
)
from paceline.kernels.stand_in import StandIn

pytest.importorskip("triton")


def operands(tokens: int, rows: int, inner: int, *, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight and bias of a product whose results are about 1."""
    rng = torch.Generator().manual_seed(tokens * 7 + rows)
    x = torch.randn(tokens, inner, generator=rng).to(dtype)
    weight = (torch.randn(rows, inner, generator=rng) / inner**0.5).to(dtype)
    return [x, weight, torch.randn(rows, generator=rng).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 384), (3, 384), (3, 512), (33, 128)])
def test_skinny_linear_equals_its_definition(
    tokens: int, inner: int, activation: str | None, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(tokens, 2 * 72, inner, dtype=dtype)
    exact = skinny_linear_reference(x, weight, bias, activation)
    out = skinny_linear(x, weight, bias, activation=activation)
    torch.testing.assert_close(out, exact, rtol=4 * torch.finfo(dtype).eps, atol=0.02)


@pytest.mark.parametrize(
    ("rows", "gated", "tile"),
    [
        (8448, False, (64, 128)),  # 132 tiles, one a processor of an H200
        (8449, False, (64, 64)),
        (16896, False, (64, 64)),  # two
        (16897, False, (128, 64)),
        (16896, True, (64, 128)),  # half of whose rows come out
        (16898, True, (64, 64)),
        (33794, True, (128, 64)),
    ],
)
def test_tiles_of_many_tokens_fill_processors(
    monkeypatch: pytest.MonkeyPatch, rows: int, gated: bool, tile: tuple[int, int]
) -> None:
    """So many features, and numbers of the inner dimension at a time."""
    asked: list[tuple[int, int]] = []

    def ask(x, weight, bias, activation, tile, splits, *rest) -> None:
        asked.append((tile.features, tile.inner))

    monkeypatch.setattr("paceline.kernels.skinny_linear._SKINNY_LINEAR", ask)
    x, weight = torch.empty(33, 128).bfloat16(), torch.empty(rows, 128).bfloat16()
    skinny_linear(x, weight, None, activation="silu" if gated else None)
    assert asked == [tile]


@pytest.mark.parametrize(
    ("rows", "inner", "gated", "tile"),
    [
        (3072, 2048, False, (4, 4)),  # 96 KiB for each of 128 processors
        (3076, 2048, False, (2, 4)),
        (3075, 2048, False, (1, 4)),  # as many as divide them
        (16_384, 2048, True, (2, 4)),
        (1024, 4096, False, (2, 4)),
        (6144, 4096, False, (1, 4)),
        (28_672, 4096, True, (2, 8)),
        (6144, 1024, True, (4, 2)),
        (4096, 896, False, (4, 2)),  # in 1,024 columns
        (4096, 640, False, (4, 1)),  # five chunks of 128
        (5120, 3072, False, (1, 2)),
        (34_816, 5120, True, (2, 4)),  # five chunks of 1,024
        (2048, 8192, False, (1, 8)),
        (4096, 14_336, False, (1, 8)),
        (5120, 17_408, False, (1, 8)),
    ],
)
def test_rows_and_warps_of_a_program_of_one_token(
    rows: int, inner: int, gated: bool, tile: tuple[int, int]
) -> None:
    from paceline.kernels._triton.skinny_linear import _one_tile

    weight = torch.empty(rows, inner, dtype=torch.bfloat16, device="meta")
    with StandIn("cuda", 128):
        assert _one_tile(weight, 2 if gated else 1) == tile


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("rows", "inner"),
    [(12, 1024), (10, 2048), (6, 2048), (4, 4096), (6, 896), (12, 640), (6, 2560), (2, 14_336)],
)
def test_a_product_of_one_token_is_the_same_whatever_its_tile(
    rows: int, inner: int, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of the weight is on its way at once, and where it is not, with rows that lie apart
    and, if they are not gated, as many as nothing divides."""
    from paceline.kernels._triton import skinny_linear as kernel

    x, weight, bias = operands(1, rows, inner, dtype=torch.float16)
    wide = torch.full((rows, inner + 8), float("nan"), dtype=torch.float16)
    wide[:, :inner] = weight
    weight = wide[:, :inner]
    if activation is None:
        weight, bias = weight[1:], bias[1:]
    for at_once in (0, 1 << 20):
        monkeypatch.setattr(kernel, "_AT_ONCE_BYTES", at_once)
        for given in (bias, None):
            exact = skinny_linear_reference(x, weight, given, activation)
            found = skinny_linear(x, weight, given, activation=activation)
            torch.testing.assert_close(found, exact, rtol=4e-3, atol=0.02)


def test_a_weight_of_few_long_rows_is_held_by_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """19 rows for 4 programs: of each 3 in registers, and 1 or 2 through the ring."""
    from paceline.kernels._triton import skinny_linear as kernel

    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 1)
    x, weight, bias = operands(1, 19, 5120, dtype=torch.float16)
    launched, launch = list[object](), kernel.launch

    def noted(jitted: object, *args: object, **options: object) -> None:
        launched.append(jitted)
        launch(jitted, *args, **options)

    monkeypatch.setattr(kernel, "launch", noted)
    exact = skinny_linear_reference(x, weight, None, None)
    for rows in (19, 7):  # 7 are not as many as are held
        found = skinny_linear(x, weight[:rows], None)
        torch.testing.assert_close(found, exact[:, :rows], rtol=4e-3, atol=0.02)
    skinny_linear(x, weight, bias)
    kinds = [kernel._held_linear_kernel] * 2 + [kernel._one_token_kernel]
    assert launched == kinds


@pytest.mark.parametrize(
    ("rows", "inner", "is_held"),
    [
        (3168, 5120, True),  # 6 for each of 528 programs
        (3169, 5120, False),
        (3168, 2560, False),
        (3168, 4096, False),
        (3168, 4608, False),  # 9 chunks of 512
        (3168, 10240, False),
    ],
)
def test_no_more_is_held_than_can_be_on_its_way(rows: int, inner: int, is_held: bool) -> None:
    from paceline.kernels._triton.skinny_linear import _is_held

    with StandIn("cuda", 132):
        assert _is_held(rows, inner, torch.device("meta")) == is_held


def test_rows_of_some_lengths_pass_through_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """22 rows, 4 of a round: 6 rounds, the last of 2, of 2 programs; 3 rows are one program's."""
    from paceline.kernels._triton import skinny_linear as kernel

    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(kernel, "shared_memory_bytes", lambda device: 2**18)
    monkeypatch.setattr(kernel, "_RING_LEAST", 3)
    x, weight, bias = operands(1, 22, 2560, dtype=torch.float16)
    launched, launch = list[object](), kernel.launch

    def noted(jitted: object, grid: tuple[int], *args: object, **options: object) -> None:
        launched.append((jitted, grid))
        launch(jitted, grid, *args, **options)

    monkeypatch.setattr(kernel, "launch", noted)
    exact = skinny_linear_reference(x, weight, None, None)
    for rows in (22, 3):
        found = skinny_linear(x, weight[:rows], None)
        torch.testing.assert_close(found, exact[:, :rows], rtol=4e-3, atol=0.02)
    skinny_linear(x, weight, bias)
    assert launched[:2] == [(kernel._ring_linear_kernel, (programs,)) for programs in (2, 1)]
    assert launched[2][0] is kernel._one_token_kernel


@pytest.mark.parametrize(
    ("rows", "inner", "size", "is_ringed"),
    [
        (10_240, 2560, 232_448, True),
        (10_239, 2560, 232_448, False),
        (10_240, 2560, 204_800, False),  # two programs of a processor fill as much
        (10_240, 2048, 232_448, False),
        (10_240, 3072, 232_448, False),
        (10_240, 2304, 232_448, False),  # 9 chunks of 256
    ],
)
def test_rings_fit_a_processor(
    rows: int, inner: int, size: int, is_ringed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels._triton import skinny_linear as kernel

    monkeypatch.setattr(kernel, "shared_memory_bytes", lambda device: size)
    assert kernel._is_ringed(rows, inner, torch.device("meta")) == is_ringed


@pytest.mark.parametrize("tokens", [2, 20])
def test_split_products_add_all_parts_and_leave_their_counters_zero(tokens: int) -> None:
    x, weight, bias = operands(tokens, 128, 512, dtype=torch.float16)
    counters = arrival_counters(128, device=x.device)
    split = skinny_linear(x, weight, bias, counters=counters)
    again = skinny_linear(x, weight, bias, counters=counters)
    assert not counters.any()
    assert torch.equal(split, again)
    whole = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(split.double(), whole, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("rows", "programs", "step"), [(2112, 132, 256), (2176, 136, 128)])
def test_a_step_fills_a_processor_where_none_has_two_programs(
    monkeypatch: pytest.MonkeyPatch, rows: int, programs: int, step: int
) -> None:
    """An H200 has 132.  Each split takes a whole number of steps, of either width."""
    asked: list[tuple[int, int]] = []

    def ask(x, weight, bias, activation, tile, splits, *rest) -> None:
        asked.append((splits * -(-rows // tile.features), tile.inner))

    monkeypatch.setattr("paceline.kernels.skinny_linear._SKINNY_LINEAR", ask)
    x, weight = torch.empty(8, 1024).bfloat16(), torch.empty(rows, 1024).bfloat16()
    skinny_linear(x, weight, None, counters=arrival_counters(rows, device=x.device))
    assert asked == [(programs, step)]


def test_operands_on_a_cpu_take_another_way() -> None:
    x, weight, _ = operands(1, 64, 128, dtype=torch.bfloat16)
    assert not fits_skinny(x, weight)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, w, b: (x[:, :100], w[:, :100], b), r"x must be contiguous rows.* of 128"),
        (lambda x, w, b: (x.new_zeros(65, 256), w, b), r"x must be .*\[1\.\.64, inner\], got"),
        (lambda x, w, b: (x.float(), w, b), r"x must be bfloat16 or float16.*kernels\.linear"),
        (lambda x, w, b: (x, w.float(), b), r"weight must be torch\.bfloat16 \[out, 256\]"),
        (lambda x, w, b: (x, w, b[:3]), r"bias must be torch\.bfloat16 \[64\]"),
    ],
)
def test_operands_that_do_not_fit_are_named(change, text: str) -> None:
    x, weight, bias = change(*operands(2, 64, 256, dtype=torch.bfloat16))
    with pytest.raises(KernelArgumentError, match=text):
        skinny_linear(x, weight, bias)


def test_an_activation_needs_a_known_name_and_two_rows_a_feature() -> None:
    x, weight, bias = operands(2, 65, 256, dtype=torch.bfloat16)
    with pytest.raises(KernelArgumentError, match="activation must be one of gelu, gelu_tanh, rel"):
        skinny_linear(x, weight, bias, activation="swish")
    with pytest.raises(KernelArgumentError, match=r"weight must be .*\[2 \* out, 256\]"):
        skinny_linear(x, weight, bias, activation="silu")


@pytest.mark.parametrize(
    "change", [lambda c: c[:1], lambda c: c.long(), lambda c: c.repeat(2)[::2]]
)
def test_counters_of_another_layer_are_refused(change) -> None:
    """Fewer than tiles, and the parts would be counted in somebody else's memory."""
    x, weight, bias = operands(2, 128, 512, dtype=torch.bfloat16)
    counters = change(arrival_counters(128, device=x.device))
    with pytest.raises(
        KernelArgumentError, match=r"counters must be .*int32 with at least 2 .*got"
    ):
        skinny_linear(x, weight, bias, counters=counters)
