"""Products of few tokens, of plain and packed weights, and of many in fp8, compiled: at the shapes
of real layers and at the edges of their tiles."""

from collections.abc import Callable

import pytest
import torch
from packed_cases import KINDS, random_weight, relative

from paceline.kernels.act_and_mul import ACTIVATIONS, act_and_mul_reference, activate
from paceline.kernels.activated_linear import activated_linear, fits_activated
from paceline.kernels.linear import (
    add_linear,
    fits_add_linear,
    gated_linear,
    linear,
    linear_then,
)
from paceline.kernels.linear_parts import fits_parts, linear_parts
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU, moe_experts_reference
from paceline.kernels.moe_route import moe_route
from paceline.kernels.packed_experts import PackedExpertWeights, PackedMatrices, packed_experts
from paceline.kernels.packed_linear import packed_linear
from paceline.kernels.packed_weight import FP8, INT4, PackedWeight, Packing, encode, pack_codes
from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.scaled_linear import fits_scaled, scaled_linear, scaled_linear_reference
from paceline.kernels.skinny_linear import MAX_TOKENS, arrival_counters, fits_skinny, skinny_linear
from paceline.kernels.skinny_scaled_linear import (
    fits_skinny_scaled,
    skinny_scaled_linear,
    skinny_scaled_linear_reference,
)
from paceline.kernels.unpack_weight import unpack_weight

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


def test_a_product_whose_rings_are_filled_before_it_waits_sees_what_was_written_last() -> None:
    """One token through norms and products in turns, in a graph: of 10,240 rows and of an odd
    number."""
    weights = [operands(1, rows, 2560)[1] for rows in (10_240, 10_577)]
    norm, given = torch.ones(2560, device="cuda").bfloat16(), torch.zeros(1, 2560, device="cuda")
    given = given.bfloat16()

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        found, x = [], given
        for index in range(8):
            x = rms_norm(x, norm, 1e-6)
            y = linear(x, weights[index % 2], None)
            found.append((x, y))
            x = y[:, 1000:3560]
        return found

    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in range(20):
        given.copy_(torch.randn(1, 2560, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        for index, (x, y) in enumerate(found):
            assert_exact(y, x.double() @ weights[index % 2].double().T)


@TOKENS
@pytest.mark.parametrize(
    ("rows", "inner"),
    [
        (6144, 4096),
        (2048, 4096),
        (12288, 4096),
        (17000, 4096),
        (4096, 14336),
        (1000, 1152),
        (129, 256),
        (1, 2048),
    ],
    ids=["qkv", "kept", "wide", "wider", "down", "odd", "narrow", "one feature"],
)
def test_products_equal_float64(tokens: int, rows: int, inner: int) -> None:
    x, weight, bias = operands(tokens, rows, inner)
    assert fits_skinny(x, weight)
    counters = arrival_counters(rows, device=x.device)
    exact = x.double() @ weight.double().T + bias.double()
    for _ in range(2):
        assert_exact(linear(x, weight, bias, counters=counters), exact)
        assert not counters.any()


@pytest.mark.parametrize("rows", [1, 77, 2560, 3168])
def test_weights_that_few_programs_hold_are_multiplied_whole(rows: int) -> None:
    x, weight, _ = operands(1, rows, 5120)
    assert_exact(linear(x, weight, None), x.double() @ weight.double().T)


@TOKENS
@pytest.mark.parametrize(("rows", "inner"), [(2 * 14336, 4096), (2 * 72, 128), (2, 256)])
def test_gated_products_equal_float64(tokens: int, rows: int, inner: int) -> None:
    x, weight, bias = operands(tokens, rows, inner)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        gated_linear(x, weight, bias, "silu").double(), exact, rtol=2**-5, atol=5e-2
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "features", "inner"), [(2125, 3072, 768), (2048, 136, 64)])
@pytest.mark.parametrize("gated", [False, True])
def test_activations_in_products_equal_float64(
    tokens: int, features: int, inner: int, activation: str, gated: bool
) -> None:
    """Of whole tiles and of partial ones, eagerly and replayed behind the product before it."""
    x, weight, bias = operands(tokens, features * (1 + gated), inner)
    assert fits_activated(x, weight, gated=gated)
    product = (x.double() @ weight.double().T + bias.double()).bfloat16()
    run = gated_linear if gated else linear_then
    exact = (
        act_and_mul_reference(product, activation)
        if gated
        else activate(product.float(), activation)
    )
    out = run(x, weight, bias, activation)
    torch.testing.assert_close(out.double(), exact.double(), rtol=2**-6, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    copied = torch.empty_like(x)
    with torch.cuda.graph(graph):
        copied.copy_(x)
        again = run(copied, weight, bias, activation)
    graph.replay()
    assert torch.equal(again, out)


@pytest.mark.parametrize(("features", "inner"), [(14_336, 4096), (8192, 2048), (14_328, 1088)])
def test_a_full_decodes_gates_are_activated_in_their_product(features: int, inner: int) -> None:
    """Of long sums, the last tile of features partial in one case."""
    x, weight, bias = operands(256, 2 * features, inner)
    assert fits_activated(x, weight, gated=True)
    product = (x.double() @ weight.double().T + bias.double()).bfloat16()
    out = gated_linear(x, weight, bias, "silu")
    exact = act_and_mul_reference(product, "silu")
    torch.testing.assert_close(out.double(), exact.double(), rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("tokens", [65, 96, 200, 256])
@pytest.mark.parametrize(("rows", "inner"), [(4096, 14_336), (2048, 8192), (72, 8192)])
def test_a_norm_adds_the_parts_of_a_product(tokens: int, rows: int, inner: int) -> None:
    x, weight, _ = operands(tokens, rows, inner)
    assert fits_parts(x, weight)
    parts, exact = linear_parts(x, weight), x.double() @ weight.double().T
    torch.testing.assert_close(parts.double().sum(0), exact, rtol=1e-5, atol=1e-4)
    rng = torch.Generator("cuda").manual_seed(0)
    residual = torch.randn(tokens, rows, generator=rng, device="cuda").bfloat16()
    scale = torch.rand(rows, generator=rng, device="cuda").bfloat16()
    streams = residual.clone(), residual.clone()
    out = add_rms_norm(parts, streams[0], scale, 1e-5)
    assert torch.equal(out, add_rms_norm((parts[0] + parts[1]).bfloat16(), streams[1], scale, 1e-5))
    assert torch.equal(*streams)
    graph = torch.cuda.CUDAGraph()
    copied = torch.empty_like(x)
    with torch.cuda.graph(graph):
        copied.copy_(x)
        again = add_rms_norm(linear_parts(copied, weight), residual, scale, 1e-5)
    graph.replay()
    assert torch.equal(again, out)
    assert torch.equal(residual, streams[0])


@pytest.mark.parametrize("tokens", [512, 1000, 1024])
@pytest.mark.parametrize(("rows", "inner"), [(4096, 4096), (4096, 14_336), (2048, 8192)])
def test_a_product_is_added_to_the_stream(tokens: int, rows: int, inner: int) -> None:
    """At most as far from exact as a product and a sum that are rounded apart."""
    x, weight, _ = operands(tokens, rows, inner)
    assert fits_add_linear(x)
    rng = torch.Generator("cuda").manual_seed(0)
    before = torch.randn(tokens, rows, generator=rng, device="cuda").bfloat16()
    stream, exact = before.clone(), before.double() + x.double() @ weight.double().T
    add_linear(x, weight, stream)
    apart = (before + linear(x, weight, None)).double()
    error, limit = (stream.double() - exact).abs(), (apart - exact).abs()
    assert error.max() <= 1.01 * limit.max()
    assert error.mean() <= 1.01 * limit.mean()
    graph = torch.cuda.CUDAGraph()
    copied = torch.empty_like(x)
    with torch.cuda.graph(graph):
        copied.copy_(x)
        add_linear(copied, weight, before)
    graph.replay()
    assert torch.equal(before, stream)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_may_be_of_any_size_and_no_numbers(activation: str) -> None:
    """Each in a row of its own: what a device makes of 2^p that overflows, and of division by
    it."""
    sizes = [0.0, 1e-30, 1.0, 88.0, 100.0, 6e4, 1e20, 1e36, 3e38, torch.inf, torch.nan]
    values = torch.tensor([*sizes, *(-size for size in sizes)], device="cuda").bfloat16()
    x = values.new_zeros(len(values), 64)
    x[:, 0] = values
    out = activated_linear(x, x.new_ones(8, 64), None, activation, gated=False)
    exact = activate(values.double().cpu(), activation)[:, None].expand(-1, 8)
    least = 1e-6 if activation.startswith("gelu") else 1e-36
    torch.testing.assert_close(out.double().cpu(), exact, rtol=2**-7, atol=least, equal_nan=True)


@TOKENS
@pytest.mark.parametrize("weights", ["plain", "packed", "rounded inputs"])
def test_a_replayed_chain_never_reads_before_its_input_is_written(
    tokens: int, weights: str
) -> None:
    """Products that start while the one before drains, each reading what that one wrote, their
    parts and counters used again and again: the same bits as with a pause behind each."""
    x, weight, bias = operands(tokens, 1024, 1024)
    counters = arrival_counters(1024, device=x.device)
    packing = KINDS["int4-g128"]
    if weights == "rounded inputs":
        packing = Packing(FP8, None, False, torch.float32, rounds_inputs=True)
    packed = encode(weight, packing)

    def product(out: torch.Tensor) -> torch.Tensor:
        if weights == "rounded inputs":
            return skinny_scaled_linear(out, packed, bias, packing, counters=counters)
        if weights == "packed":
            return packed_linear(out, packed, bias, packing, counters=counters)
        return skinny_linear(out, weight, bias, counters=counters)

    def chain(pause: Callable[[], None]) -> torch.Tensor:
        out = x
        for _ in range(40):
            for _ in range(2):
                out = product(out)
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


def on_gpu(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(*(None if part is None else part.cuda() for part in weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(200, 1056), (1024, 4096), (66, 288)])
def test_packed_products_equal_float64(kind: str, rows: int, columns: int) -> None:
    packing = KINDS[kind]
    weight, numbers = random_weight(rows, columns, packing)
    weight, numbers = on_gpu(weight), numbers.cuda()
    rng = torch.Generator("cuda").manual_seed(rows)
    for dtype in (torch.bfloat16, torch.float16):
        bias = torch.randn(rows, generator=rng, device="cuda").to(dtype)
        unpacked = unpack_weight(weight, packing, columns, dtype)
        assert relative(unpacked, numbers) <= once_rounded(numbers, dtype)
        for tokens in (1, 2, 3, 8, 17, MAX_TOKENS, 100, 200):
            holds_scales = packing.group is None or packing.scale_dtype == dtype
            if tokens > MAX_TOKENS and (not holds_scales or packing.group not in (None, 128)):
                continue  # as packed_linear refuses
            # So small that a gate times an up is a float16.
            x = (torch.randn(tokens, columns, generator=rng, device="cuda") / 16).to(dtype)
            exact = x.double() @ numbers.T + bias.double()
            counters = arrival_counters(rows, device=x.device)
            # Of many tokens a number is rounded with its scale, too.
            roundings = 2 if tokens > MAX_TOKENS and packing.group is not None else 1
            for _ in range(2):
                ours = packed_linear(x, weight, bias, packing, counters=counters)
                assert relative(ours, exact) <= roundings**0.5 * once_rounded(exact, dtype)
                assert not counters.any()
            gate, up = exact.chunk(2, dim=1)
            gated = packed_linear(x, weight, bias, packing, activation="silu")
            # Gate, up, activation and product are rounded, each by at most half of what follows 1.
            most = (3 + roundings) * torch.finfo(dtype).eps / 2
            assert relative(gated, torch.nn.functional.silu(gate) * up) < most


def once_rounded(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """What rounding these very numbers once does, of many 1.7e-3 in bfloat16 and 2.1e-4 in float16
    (of each at most 3.9e-3 and 4.9e-4), and a tenth for float32 sums."""
    return 1.1 * relative(exact.to(dtype), exact)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_every_code_is_read_in_its_place_whatever_its_scale(tokens: int) -> None:
    """One number of x at a time, in each column: what comes out is the code's number itself."""
    columns = 4 * 128
    codes = torch.arange(columns).repeat(16, 1).add(torch.arange(16)[:, None]) % 16
    scale = torch.exp2(torch.arange(-60, 4, dtype=torch.float32)).view(16, 4)
    packing = Packing(INT4, 128, False, torch.float32)
    weight = on_gpu(PackedWeight(pack_codes(codes.to(torch.uint8), 4), scale, None))
    numbers = (codes.float() - 8) * scale.repeat_interleave(128, dim=1)
    for first in range(0, columns, tokens):
        x = torch.zeros(tokens, columns, dtype=torch.bfloat16)
        for row, column in enumerate(range(first, min(columns, first + tokens))):
            x[row, column] = 1.0
        ours = packed_linear(x.cuda(), weight, None, packing)
        assert torch.equal(ours.cpu(), (x.float() @ numbers.T).bfloat16())


@pytest.mark.parametrize(("columns", "group"), [(4096, None), (200, None), (4096, 128), (500, 128)])
def test_products_of_rounded_rows_equal_those_with_what_codes_stand_for(
    columns: int, group: int | None
) -> None:
    shared = group or 1
    packing = Packing(FP8, group, False, torch.float32, shared, rounds_inputs=True)
    rng = torch.Generator("cuda").manual_seed(columns)
    numbers = torch.randn(1024, columns, generator=rng, device="cuda")
    numbers *= torch.exp2(3 * torch.rand(1024, 1, generator=rng, device="cuda"))
    weight = encode(numbers, packing)
    x = torch.randn(130, columns, generator=rng, device="cuda").bfloat16()
    x[1], x[2] = x[1] * 1e-6, 0.0
    assert fits_scaled(x, weight, packing)
    ours = scaled_linear(x, weight, None, packing)
    wanted = scaled_linear_reference(x.float(), weight, None, packing).double()
    assert relative(ours, wanted) < 1.1 * relative(wanted.bfloat16(), wanted)
    assert relative(ours, x.double() @ numbers.T.double()) < 0.05
    bias = torch.randn(1024, generator=rng, device="cuda").bfloat16()
    biased = scaled_linear(x, weight, bias, packing)
    twice = 2**0.5 if group is not None else 1.0  # of groups rounded before the bias, and behind
    once = relative((wanted + bias).bfloat16(), wanted + bias)
    assert relative(biased, wanted + bias) < 1.1 * twice * once


@pytest.mark.parametrize("columns", [4096, 200])
def test_few_rounded_rows_equal_what_codes_stand_for(columns: int) -> None:
    packing = Packing(FP8, None, False, torch.float32, rounds_inputs=True)
    rng = torch.Generator("cuda").manual_seed(columns)
    numbers = torch.randn(1000, columns, generator=rng, device="cuda") / columns**0.5
    numbers *= torch.exp2(3 * torch.rand(1000, 1, generator=rng, device="cuda"))
    weight = encode(numbers, packing)
    bias = torch.randn(1000, generator=rng, device="cuda").bfloat16()
    counters = arrival_counters(1000, device=bias.device)
    for tokens in (33, 50, MAX_TOKENS):
        x = torch.randn(tokens, columns, generator=rng, device="cuda").bfloat16()
        x[1], x[2] = x[1] * 1e-6, 0.0
        assert fits_skinny_scaled(x, packing)
        exact = scaled_linear_reference(x.float(), weight, bias, packing).double()
        for _ in range(2):
            ours = skinny_scaled_linear(x, weight, bias, packing, counters=counters)
            assert relative(ours, exact) < once_rounded(exact, torch.bfloat16)
            assert not counters.any()
        gated = skinny_scaled_linear(x, weight, bias, packing, activation="silu")
        wanted = skinny_scaled_linear_reference(x.float(), weight, bias, packing, "silu").double()
        assert relative(gated, wanted) < 4 * torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize("kind", ["int4-g128", "int4-g32-zeros", "fp8-row", "fp8-g128", "int8-row"])
def test_packed_experts_equal_those_with_the_numbers(kind: str) -> None:
    experts, hidden, inter, slots = 8, 1056, 320, 3
    made, numbers = [], []
    for rows, columns in ((2 * inter, hidden), (hidden, inter)):
        packed, exact = random_weight(experts * rows, columns, KINDS[kind], seed=rows)
        made.append(PackedMatrices(on_gpu(packed), KINDS[kind], columns))
        numbers.append(exact.unflatten(0, (experts, rows)).float().cuda())
    weights = PackedExpertWeights(*made)
    rng = torch.Generator("cuda").manual_seed(0)
    for tokens in (1, 7, 100, 700):
        x = torch.randn(tokens, hidden, generator=rng, device="cuda").bfloat16()
        logits = torch.randn(tokens, experts, generator=rng, device="cuda")
        routing = moe_route(logits, slots, renormalize=True)
        stack = ExpertWeights(numbers[0], None, numbers[1], None)
        gate = SwiGLU(1.0, None, 0.0)
        exact = moe_experts_reference(x.float(), routing, stack, gate)
        ours = packed_experts(x, routing, weights, gate)
        # What is gated, each expert's part and their sum are rounded: the root of 3 times 1.7e-3.
        assert relative(ours, exact.double()) < 4.6e-3
