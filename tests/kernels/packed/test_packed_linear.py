"""packed_linear and unpack_weight through Triton's interpreter against float64."""

from collections.abc import Callable

import pytest
import torch
from packed_cases import KINDS, random_weight, relative
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.act_and_mul import act_and_mul_reference
from paceline.kernels.packed_linear import (
    fits_packed,
    packed_linear,
    packed_linear_reference,
)
from paceline.kernels.packed_weight import (
    FP8,
    INT4,
    PackedWeight,
    Packing,
    encode,
    pack_codes,
    unpack_codes,
    unpack_reference,
)
from paceline.kernels.skinny_linear import arrival_counters
from paceline.kernels.stand_in import StandIn
from paceline.kernels.unpack_weight import unpack_weight

pytest.importorskip("triton")

# Of correct kernels: float32 sums of exact numbers, rounded once to the activations' dtype.  The
# interpreter cuts bfloat16 off where a device rounds, which is twice the error.
ERRORS = {torch.bfloat16: 2.3e-3, torch.float16: 2.6e-4}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [384, 96])
def test_words_hold_codes_and_stand_for_numbers(kind: str, columns: int) -> None:
    packing = KINDS[kind]
    weight, numbers = random_weight(7, columns, packing)
    assert weight.words.shape == (7, packing.num_words(columns))
    torch.testing.assert_close(
        unpack_reference(weight, packing, columns).double(), numbers, rtol=1e-6, atol=0
    )
    codes = unpack_codes(weight.words, packing.bits, columns)
    assert torch.equal(pack_codes(codes, packing.bits), weight.words)


def test_words_hold_pairs_of_columns_as_the_matrix_unit_reads_them() -> None:
    column = torch.arange(128)
    codes = (column // 8 * 2 + column % 2).to(torch.uint8)[None] % 16
    assert pack_codes(codes, 4)[0, 0].item() == 0x75316420
    by_byte = column.to(torch.uint8)[None]
    assert pack_codes(by_byte, 8)[0, 31].item() == 0x7F777E76


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "columns", "dtype"),
    [
        (1, 384, torch.bfloat16),
        (1, 96, torch.float16),
        (2, 256, torch.float16),
        (3, 256, torch.float16),
        (3, 160, torch.bfloat16),
        (40, 256, torch.float16),
    ],
)
def test_a_product_equals_that_with_the_numbers(
    tokens: int, columns: int, kind: str, dtype: torch.dtype
) -> None:
    packing = KINDS[kind]
    # Not a multiple of what a program has; of one token more tiles than programs.
    rows = 140 if tokens == 1 else 44 if tokens < 5 else 72
    weight, numbers = random_weight(rows, columns, packing)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    exact = x.double() @ numbers.T
    ours = packed_linear(x, weight, None, packing)
    assert relative(ours, exact) < 2 * ERRORS[dtype]
    reference = packed_linear_reference(x, weight, None, packing, None)
    assert relative(reference, exact) < 2 * ERRORS[dtype]


@pytest.mark.parametrize("kind", ["int4-g128", "int4-g32-zeros", "fp8-row"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_bias_and_activation_follow(tokens: int, kind: str) -> None:
    packing, dtype = KINDS[kind], torch.float16
    weight, numbers = random_weight(2 * 10, 256, packing)
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 256, generator=rng).to(dtype)
    bias = torch.randn(20, generator=rng).to(dtype)
    exact = x.double() @ numbers.T + bias.double()
    assert relative(packed_linear(x, weight, bias, packing), exact) < 2 * ERRORS[dtype]
    gated = act_and_mul_reference(exact.float().to(dtype), "silu").double()
    ours = packed_linear(x, weight, bias, packing, activation="silu")
    assert relative(ours, gated) < 4 * ERRORS[dtype]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, interpreting
@pytest.mark.parametrize(
    ("kind", "columns"), [("int4-g128", 512), ("int4-g128", 257), ("fp8-row", 512)]
)
def test_one_token_may_have_numbers_of_any_size(kind: str, columns: int) -> None:
    packing = KINDS[kind]
    weight, numbers = random_weight(9, columns, packing)
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(2)).half()
    x[0, ::37] *= 300
    x[0, 64:128] = 0.0
    x[0, -1] = 100.0
    ours, exact = packed_linear(x, weight, None, packing), x.double() @ numbers.T
    assert relative(ours, exact) < 2 * ERRORS[torch.float16]
    for odd in (torch.inf, torch.nan):
        x[0, 77] = odd
        assert not packed_linear(x, weight, None, packing).isfinite().any()


@pytest.mark.parametrize(
    ("kind", "columns", "first", "is_one"),
    [
        ("int4-g128", 256, 2, True),
        ("int4-row-plain", 256, 0, True),
        ("fp8-row", 4096, 0, True),
        ("fp8-g128", 256, 0, True),
        ("fp8-g128", 4224, 0, False),  # 33 chunks
        ("int4-g128", 256, 1, False),  # pairs of numbers that no word holds
        ("int4-g128", 257, 0, False),
        ("int4-g64", 256, 0, False),
        ("int4-row", 256, 0, False),  # with zeros
        ("int8-row", 256, 0, False),
    ],
)
def test_one_token_takes_a_kernel_of_its_own_where_numbers_lie_in_pairs(
    monkeypatch: pytest.MonkeyPatch, kind: str, columns: int, first: int, is_one: bool
) -> None:
    from paceline.kernels._triton import packed_linear as launcher

    launched = list[object]()
    monkeypatch.setattr(
        launcher, "launch", lambda jitted, *args, **options: launched.append(jitted)
    )
    weight, _ = random_weight(2, columns, KINDS[kind])
    packed_linear(torch.zeros(1, first + columns).half()[:, first:], weight, None, KINDS[kind])
    assert launched == [launcher.packed_one_kernel if is_one else launcher.packed_few_kernel]


@pytest.mark.parametrize(
    ("kind", "tokens", "slices"),
    [
        ("int4-g128", 2, 8),
        ("int4-g128", 3, 1),
        ("int4-row", 4, 1),
        ("fp8-row", 4, 4),
        ("int8-row", 4, 4),
        ("fp8-row", 5, 1),
    ],
)
def test_three_tokens_of_4_bits_fill_no_tile_with_slices(
    monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, slices: int
) -> None:
    from paceline.kernels._triton import packed_linear as launcher

    launched = list[object]()
    monkeypatch.setattr(
        launcher, "launch", lambda *args, **options: launched.append(options["SLICES"])
    )
    weight, _ = random_weight(2, 256, KINDS[kind])
    packed_linear(torch.zeros(tokens, 256).half(), weight, None, KINDS[kind])
    assert launched == [slices]


@pytest.mark.parametrize(("tokens", "kind"), [(6, "int4-g128"), (20, "int8-row")])
def test_split_products_add_all_parts_and_leave_their_counters_zero(tokens: int, kind: str) -> None:
    packing = KINDS[kind]
    weight, numbers = random_weight(100, 512, packing)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(1)).half()
    counters = arrival_counters(100, device=x.device)
    split = packed_linear(x, weight, None, packing, counters=counters)
    again = packed_linear(x, weight, None, packing, counters=counters)
    assert not counters.any()
    assert torch.equal(split, again)
    assert relative(split, x.double() @ numbers.T) < 2 * ERRORS[torch.float16]


@pytest.mark.parametrize(
    ("tokens", "columns", "kind"),
    [(65, 160, "int8-g128-zeros"), (130, 512, "int4-g128"), (70, 128, "int4-row")],
)
def test_many_tokens_are_multiplied_in_tiles(tokens: int, columns: int, kind: str) -> None:
    packing, dtype, rows = KINDS[kind], torch.float16, 2 * 66
    weight, numbers = random_weight(rows, columns, packing)
    rng = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=rng).to(dtype) / 16
    bias, counters = (
        torch.randn(rows, generator=rng).to(dtype),
        arrival_counters(300, device=x.device),
    )
    exact = x.double() @ numbers.T + bias.double()
    for _ in range(2):
        ours = packed_linear(x, weight, bias, packing, counters=counters)
        assert relative(ours, exact) < 2 * ERRORS[dtype]
        assert not counters.any()
    gate, up = exact.chunk(2, dim=1)
    gated = packed_linear(x, weight, bias, packing, activation="silu")
    assert relative(gated, torch.nn.functional.silu(gate) * up) < 4 * ERRORS[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [640, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpacked_numbers_are_rounded_once(kind: str, columns: int, dtype: torch.dtype) -> None:
    from paceline.kernels._triton.unpack_weight import launch_unpack_weight

    packing = KINDS[kind]
    weight, _ = random_weight(35, columns, packing)
    exact = unpack_reference(weight, packing, columns).to(dtype)
    assert torch.equal(unpack_weight(weight, packing, columns, dtype), exact)  # the CPU's
    ours = torch.full((35, columns), torch.nan, dtype=dtype)
    launch_unpack_weight(weight, kind=packing.kind, group=packing.group or columns, out=ours)
    cut_off = 2**-7 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(ours, exact, rtol=cut_off, atol=0)


@pytest.mark.parametrize("kind", ["int4-g128", "int8-g32", "fp8-row", "fp8-g128"])
def test_codes_are_the_nearest_to_numbers(kind: str) -> None:
    packing = KINDS[kind]
    numbers = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    encoded = unpack_reference(encode(numbers, packing), packing, 256)
    step = {"int4": 0.13, "int8": 0.01, "fp8": 0.03}[packing.kind]  # the page's errors
    assert relative(encoded, numbers.double()) < step


def test_rows_on_a_cpu_take_another_way() -> None:
    assert not fits_packed(torch.zeros(1, 128, dtype=torch.bfloat16), KINDS["int4-g64"])


@pytest.mark.parametrize(
    ("packing", "dtype", "most"),
    [
        (Packing(INT4, 128, False, torch.bfloat16), torch.bfloat16, 256),
        (Packing(INT4, 128, False, torch.bfloat16), torch.float16, 64),
        (KINDS["int4-g128"], torch.bfloat16, 64),  # its scales would be rounded
        (KINDS["int4-g64"], torch.bfloat16, 64),
        (KINDS["int8-row"], torch.bfloat16, 64),
    ],
)
def test_more_tokens_fit_where_they_are_faster(
    packing: Packing, dtype: torch.dtype, most: int
) -> None:
    with StandIn("cuda", None):
        for tokens in (1, most, most + 1):
            x = torch.empty(tokens, 256, dtype=dtype, device="meta")
            assert fits_packed(x, packing) == (tokens <= most)


Change = Callable[[Tensor, PackedWeight, Packing], tuple[Tensor, PackedWeight]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x, w: (x.float(), w), r"x must be bfloat16 or float16 \[1\.\.64, columns\]"),
        (lambda x, w: (x.new_zeros(65, 256), w), r"x must be bfloat16 or float16 \[1\.\.64"),
        (lambda x, w: (x.T, w), r"x must be contiguous rows"),
        (
            lambda x, w: (x, w._replace(words=w.words.long())),
            r"words must be torch\.int32 \[80, 32\]",
        ),
        (
            lambda x, w: (x, w._replace(scale=w.scale.float())),
            r"scale must be torch\.float16 \[80,",
        ),
        (lambda x, w: (x, w._replace(zero=w.scale)), r"zero must be None, as of int4"),
    ],
)
def test_operands_that_do_not_fit_are_named(change: Change, text: str) -> None:
    packing = KINDS["int4-g128"]
    weight, _ = random_weight(80, 256, packing)
    x, weight = change(torch.zeros(2, 256, dtype=torch.bfloat16), weight)
    if text.startswith("x must be contiguous"):
        x = torch.zeros(256, 2, dtype=torch.bfloat16).T
    with pytest.raises(KernelArgumentError, match=text):
        packed_linear(x, weight, None, packing)


def test_other_arguments_are_named() -> None:
    packing = KINDS["int4-g128"]
    weight, _ = random_weight(81, 256, packing)
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    with pytest.raises(KernelArgumentError, match="words must be as many gate rows as up rows"):
        packed_linear(x, weight, None, packing, activation="silu")
    with pytest.raises(KernelArgumentError, match=r"bias must be torch\.bfloat16 \[81\]"):
        packed_linear(x, weight, torch.zeros(3, dtype=torch.bfloat16), packing)
    x, counters = x.new_zeros(5, 256), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match="counters must be contiguous int32 with at lea"):
        packed_linear(x, weight, None, packing, counters=counters)


def test_rows_of_a_block_are_encoded_with_one_scale() -> None:
    packing = Packing(FP8, 128, False, torch.float32, shared_rows=128)
    numbers = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    numbers[5, 7], numbers[150, 200] = 448.0, 896.0
    scale = encode(numbers, packing).scale
    assert torch.equal(scale, scale[::128].repeat_interleave(128, dim=0)[:200])
    assert (scale[0, 0], scale[199, 1]) == (1.0, 2.0)
