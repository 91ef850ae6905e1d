"""linear_parts, when it is taken, and what a norm makes of parts."""

import pytest
import torch

from paceline.core.errors import KernelArgumentError
from paceline.kernels.linear_parts import PARTS, fits_parts, linear_parts
from paceline.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from paceline.kernels.stand_in import StandIn
from paceline.runner.recording.recorded import RecordedGraph

EPS = 1e-6


def test_parts_are_sums_of_halves_of_the_inner_dimension() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, 12, generator=rng).bfloat16()
    weight = torch.randn(7, 12, generator=rng).bfloat16()
    parts = linear_parts(x, weight)
    assert (parts.shape, parts.dtype) == ((PARTS, 5, 7), torch.float32)
    for part, columns in zip(parts, (slice(0, 6), slice(6, 12)), strict=True):
        exact = x[:, columns].double() @ weight[:, columns].double().T
        torch.testing.assert_close(part.double(), exact, rtol=1e-5, atol=1e-5)


def test_few_tiles_of_long_sums_take_it_on_hopper() -> None:
    def fits(tokens=256, out=4096, inner=14_336, dtype=torch.bfloat16, arch=(9, 0)) -> bool:
        with StandIn("cpu" if arch is None else "cuda", 132, arch):
            x = torch.empty(tokens, inner, device="meta", dtype=dtype)
            return fits_parts(x, torch.empty(out, inner, device="meta", dtype=dtype))

    assert fits()
    assert fits(tokens=65)
    assert not fits(tokens=64)  # has products of its own
    assert not fits(tokens=257)
    assert not fits(inner=4096)
    assert not fits(inner=14_336 + 128)
    assert not fits(out=4352)  # 2 * 2 * 34 tiles for 132 processors
    assert fits(out=4352, tokens=128)
    assert not fits(dtype=torch.float32)
    assert not fits(arch=(10, 0))
    assert not fits(arch=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_norm_rounds_the_sum_of_parts_once(dtype: torch.dtype) -> None:
    """Parts that cancel to 1 + 2^-11, which added to a residual of 2^-11 would be another number of
    float16 without the rounding before."""
    from paceline.kernels._triton.rms_norm import launch_rms_norm

    rng = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 9, 200, generator=rng)
    parts[:, 0] = torch.tensor([1.0, 2.0**-11, 0.0])[:, None]
    residual = torch.randn(9, 200, generator=rng).to(dtype)
    residual[0] = 2.0**-11
    weight = torch.randn(200, generator=rng).to(dtype)
    expected, total = add_rms_norm_reference(parts, residual, weight, EPS)
    assert torch.equal(total, residual + (parts[0] + parts[1] + parts[2]).to(dtype))
    by_op, interpreted = residual.clone(), residual.clone()
    unit = torch.finfo(dtype).eps
    close = {"rtol": 4 * unit, "atol": 1e-6}
    torch.testing.assert_close(add_rms_norm(parts, by_op, weight, EPS), expected, **close)
    out = torch.full_like(residual, float("nan"))
    given = {"eps": EPS, "unit_offset": False, "wide": False}
    launch_rms_norm(parts, interpreted, weight, **given, out=out)
    torch.testing.assert_close(out, expected, **close)
    assert torch.equal(by_op, total)
    assert torch.equal(interpreted, total)


def test_a_recorded_norm_of_parts_follows_them() -> None:
    parts, weight = torch.ones(2, 3, 8), torch.ones(8)
    residual, out = torch.zeros(3, 8), torch.zeros(3, 8)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: out.copy_(add_rms_norm(parts, residual, weight, EPS)))
    for value in (2.0, -3.0):
        residual.zero_()
        parts.fill_(value)
        graph.replay()
        assert (residual == 2 * value).all()
        torch.testing.assert_close(out, torch.full((3, 8), value / abs(value)))


def test_other_parts_are_refused() -> None:
    residual, weight = torch.zeros(3, 8), torch.ones(8)
    for parts in (torch.ones(2, 4, 8), torch.ones(2, 3, 8).half(), torch.ones(2, 8, 3).mT):
        with pytest.raises(KernelArgumentError, match=r"x must be like residual, .*\[3, 8\]"):
            add_rms_norm(parts, residual, weight, EPS)
