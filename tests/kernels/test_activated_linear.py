"""activated_linear through Triton's interpreter against float64, and when it is taken."""

import pytest
import torch
import torch.nn.functional as F

from paceline.core.errors import KernelArgumentError
from paceline.kernels.act_and_mul import ACTIVATIONS
from paceline.kernels.activated_linear import activated_linear, fits_activated
from paceline.kernels.stand_in import StandIn

pytest.importorskip("triton")
# Of numpy, interpreting: 2^p where the result is 0, and infinity over it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
EXACT = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("gated", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_it_is_the_activation_of_the_product(
    activation: str, gated: bool, dtype: torch.dtype
) -> None:
    """130 tokens and 136 features are two tiles of both; results reach from -8 to 8."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(130, 64, generator=rng).to(dtype)
    weight = (torch.randn(136 * (1 + gated), 64, generator=rng) / 4).to(dtype)
    bias = torch.randn(len(weight), generator=rng).to(dtype)
    product = (x.double() @ weight.double().T + bias.double()).to(dtype).double()
    gate, up = product.chunk(2, 1) if gated else (product, None)
    exact = EXACT[activation](gate).to(dtype).double()
    exact = exact if up is None else exact * up
    out = activated_linear(x, weight, bias, activation, gated=gated, by_triton=True)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=2 * unit, atol=2e-3)
    assert out.dtype == dtype
    without = activated_linear(x, weight, None, activation, gated=gated, by_triton=True)
    assert not torch.equal(without, out)


@pytest.mark.parametrize("gated", [False, True])
def test_a_last_group_may_have_fewer_tiles(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles of tokens in groups of two, of several columns of tiles.  Of gates two programs
    take all of them in turns."""
    from paceline.kernels import activated_linear as ours
    from paceline.kernels._triton import activated_linear as kernel

    monkeypatch.setattr(kernel, "multiprocessors", lambda device: 1)
    for name in ("PLAIN_TILE", "GATED_TILE"):
        monkeypatch.setattr(ours, name, getattr(ours, name)._replace(group=2))
    x = torch.zeros(257, 64, dtype=torch.float16)
    x[:, 0] = torch.arange(257) / 2
    weight = torch.ones(136 * (1 + gated), 64, dtype=torch.float16)
    out = activated_linear(x, weight, None, "relu", gated=gated, by_triton=True)
    assert torch.equal(out, (x[:, :1] ** (1 + gated)).expand(-1, 136))


@pytest.mark.parametrize("features", [136, 128])
def test_gates_of_long_sums_have_tiles_of_their_own(
    features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program for each of two tiles of tokens and one or two of features, whose ups lie behind
    all gates."""
    from paceline.kernels import activated_linear as ours
    from paceline.kernels._triton import activated_linear as kernel

    tiles, launch = [], kernel.launch_activated_linear

    def note(*args: object, tile: ours.ProductTile) -> None:
        tiles.append(tile)
        launch(*args, tile=tile)

    monkeypatch.setattr(kernel, "launch_activated_linear", note)
    monkeypatch.setattr(ours, "MOST_INNER", 64)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(256, 128, generator=rng).half()
    weight = (torch.randn(2 * features, 128, generator=rng) / 8).half()
    out = activated_linear(x, weight, None, "silu", gated=True, by_triton=True)
    gate, up = (x.double() @ weight.double().T).half().double().chunk(2, 1)
    exact = F.silu(gate).half().double() * up
    torch.testing.assert_close(out.double(), exact, rtol=2**-9, atol=2e-3)
    assert tiles == [ours.LONG_TILE]


def test_gates_of_a_full_decode_take_it_where_their_tiles_fill_turns() -> None:
    def fits(tokens=256, inner=4096, features=14_336, sms=132, gated=True) -> bool:
        with StandIn("cuda", sms, (9, 0)):
            made = {"device": "meta", "dtype": torch.bfloat16}
            weight = torch.empty(2 * features, inner, **made)
            return fits_activated(torch.empty(tokens, inner, **made), weight, gated=gated)

    assert fits()  # 224 tiles in two turns
    assert not fits(tokens=255)
    assert not fits(tokens=512)
    assert not fits(inner=4160)
    assert not fits(gated=False)
    assert not fits(features=9728)  # 152 tiles
    assert fits(features=8192)  # 128 in one
    assert not fits(sms=222)
    assert fits(sms=224)


def test_sums_and_activations_are_rounded_before_the_product() -> None:
    """A gate and an up that lie beside a number of float16, by 0.9 of what rounding takes: without
    any of the three roundings the product is another."""
    x = torch.zeros(1, 64, dtype=torch.float16)
    x[0, :4] = torch.tensor([-6.55859375, -0.00175, 2.86328125, 0.00087])
    weight = torch.zeros(16, 64, dtype=torch.float16)
    weight[:8, :2], weight[8:, 2:4] = 1.0, 1.0
    out = activated_linear(x, weight, None, "silu", gated=True, by_triton=True)
    assert torch.equal(out, (F.silu(x[:, :1].float()).half() * x[:, 2:3]).expand(1, 8))


def test_gelu_errs_by_a_quarter_of_what_rounding_to_bfloat16_may_change() -> None:
    """Products of one number each, from -12 to 12; rounded to float16, as the interpreter cuts
    bfloat16 off."""
    values = torch.linspace(-12, 12, 4096).to(torch.float16)
    x = torch.zeros(4096, 64, dtype=torch.float16)
    x[:, 0] = values
    weight = torch.zeros(8, 64, dtype=torch.float16)
    weight[0, 0] = 1.0
    out = activated_linear(x, weight, None, "gelu", gated=False, by_triton=True)[:, 0].double()
    exact = F.gelu(values.double())
    rounded = exact.abs() * 2**-11 + 2**-25
    error = ((out - exact).abs() - rounded).clamp(min=0.0)
    assert error.max() < 4.3e-5
    assert (error <= exact.abs() * 2**-9 / 4 + 1e-6).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_may_be_of_any_size_and_no_numbers(activation: str) -> None:
    """Each in a row of its own."""
    sizes = [0.0, 1e-30, 1e-3, 1.0, 20.0, 88.0, 100.0, 6e4, 1e20, 1e36, 3e38, torch.inf, torch.nan]
    values = torch.tensor([*sizes, *(-size for size in sizes)]).bfloat16()
    x = torch.zeros(len(values), 64, dtype=torch.bfloat16)
    x[:, 0] = values
    out = activated_linear(x, x.new_ones(8, 64), None, activation, gated=False, by_triton=True)
    exact = EXACT[activation](values.double())[:, None].expand(-1, 8)
    least = 1e-6 if activation.startswith("gelu") else 1e-36
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=least, equal_nan=True)


def test_many_tokens_of_16_bits_take_it_on_a_gpu_with_a_copy_engine() -> None:
    def fits(tokens=2048, inner=768, rows=3072, first=0, **where) -> bool:
        where = {"dtype": torch.bfloat16, "arch": (9, 0), "kind": "cuda"} | where
        with StandIn(where["kind"], None, where["arch"]):
            made = {"device": "meta", "dtype": where["dtype"]}
            x = torch.empty(tokens, inner + 8, **made)[:, first : first + inner]
            return fits_activated(x, torch.empty(rows, inner, **made), gated=False)

    assert fits()
    assert not fits(arch=(12, 0))
    assert not fits(tokens=2047)
    assert not fits(inner=800)
    assert fits(inner=1024)
    assert not fits(inner=1088)
    assert not fits(rows=3076)
    assert fits(first=8)
    assert not fits(first=4)
    assert not fits(dtype=torch.float32)
    assert not fits(arch=(8, 9))
    assert not fits(arch=None)
    assert not fits(kind="cpu", arch=None)


@pytest.mark.parametrize(
    ("rows", "inner", "dtype", "name"),
    [
        (8, 96, torch.bfloat16, "x"),
        (8, 64, torch.float32, "x"),
        (8, 128, torch.bfloat16, "weight"),
        (24, 64, torch.bfloat16, "weight"),
    ],
)
def test_other_operands_are_refused(rows: int, inner: int, dtype: torch.dtype, name: str) -> None:
    x = torch.zeros(4, 64 if name == "weight" else inner, dtype=dtype)
    with pytest.raises(KernelArgumentError, match=f"^{name} must be "):
        activated_linear(x, torch.zeros(rows, inner, dtype=dtype), None, "silu", gated=True)
    with pytest.raises(KernelArgumentError, match=r"^activation must be one of"):
        activated_linear(x, x, None, "erf", gated=False)


def test_without_triton_another_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.kernels._check.find_spec", lambda name: None)
    x = torch.zeros(8, 64, dtype=torch.float16)
    with pytest.raises(KernelArgumentError, match=r"install triton, or use kernels\.linear and"):
        activated_linear(x, x, None, "silu", gated=False, by_triton=True)
