"""ragged_attention on a GPU where groups of warps take it: no interpreter runs these."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels._triton import ragged_groups as kernel
from paceline.kernels.ragged_attention import ragged_attention

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="other GPUs take the other kernel",
    ),
]

DIM = 128
LENS = (1, 64, 0, 65, 127, 128, 129, 300, 513)  # 1,327 tokens
LENS_K = {"own": LENS, "more": tuple(each + 70 for each in LENS), "fewer": (0, *LENS[:-1])}
SCALE = DIM**-0.5


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A mark for each launch of groups."""
    marks, real = [], kernel.launch_ragged_groups

    def launch(*args: Any, **asked: Any) -> None:
        marks.append(True)
        real(*args, **asked)

    monkeypatch.setattr(kernel, "launch_ragged_groups", launch)
    return marks


def make(
    lens_k: tuple[int, ...], heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """On the CPU; queries with 30 rows behind the last request, keys and values of one tensor."""
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(sum(LENS) + 30, heads, DIM, generator=generator).to(dtype)
    kv = torch.randn(sum(lens_k), 2 * kv_heads, DIM, generator=generator).to(dtype)
    cus = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (LENS, lens_k)]
    return q, *kv.split(kv_heads, dim=1), *cus


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", LENS_K)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_give_what_the_definition_gives(
    dtype: torch.dtype, heads: tuple[int, int], keys: str, causal: bool, taken: list[bool]
) -> None:
    given = make(LENS_K[keys], *heads, dtype)
    out, lse = ragged_attention(*(each.cuda() for each in given), causal=causal, scale=SCALE)
    assert taken
    wide = (each.double() if each.is_floating_point() else each for each in given)
    wanted, wanted_lse = ragged_attention(*wide, causal=causal, scale=SCALE)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
    error = (out.cpu().double() - wanted).norm() / wanted.norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 5e-4), error
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_a_request_is_the_same_whatever_stands_beside_it(causal: bool, taken: list[bool]) -> None:
    """Behind its last tile of keys stand those of the next, which are not finite here."""
    given = [each.cuda() for each in make(LENS, 4, 2, torch.bfloat16)]
    wanted, _ = ragged_attention(*given, causal=causal, scale=SCALE)
    start, stop = sum(LENS[:-1]), sum(LENS)
    for each in given[:3]:
        each[start:stop] = float("nan")
    given[2][start:stop:2] = float("inf")
    out, _ = ragged_attention(*given, causal=causal, scale=SCALE)
    assert torch.equal(out[:start], wanted[:start])
    assert out[start:stop].isnan().all()
    assert not out[stop:].any()
    assert len(taken) == 2


def test_many_short_requests(taken: list[bool]) -> None:
    """More than are looked at together, and of fewer queries than a tile."""
    lens = [3] * 400
    q = torch.randn(1200, 2, DIM, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    out, _ = ragged_attention(q, q, q, cu, cu, causal=True, scale=SCALE)
    scores = torch.einsum("rqhd,rkhd->rhqk", *[q.double().view(400, 3, 2, DIM)] * 2) * SCALE
    scores.masked_fill_(torch.ones(3, 3, device="cuda").triu(1).bool(), -torch.inf)
    wanted = torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), q.double().view(400, 3, 2, DIM))
    torch.testing.assert_close(out.double(), wanted.reshape(out.shape), rtol=1e-2, atol=1e-2)
    assert taken
