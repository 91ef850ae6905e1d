"""ragged_attention: requests with keys of their own, against a mask and a softmax in float64."""

import math

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.ragged_attention import SharedColumns, ragged_attention

F32 = torch.float32
LENS_Q = (1, 70, 0, 33, 5, 128)
LENS_K = {"own": LENS_Q, "more": (9, 70, 3, 129, 64, 200), "fewer": (0, 60, 2, 33, 1, 128)}
LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-3), torch.float16: (6e-4, 1e-3)}


def run_triton(*args, **asked) -> tuple[Tensor, Tensor]:
    return ragged_attention(*args, **asked, by_triton=True)


RUNS = pytest.mark.parametrize("run", [ragged_attention, run_triton], ids=["op", "triton"])


def oracle(q, k, v, *, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Of one request, over dense scores in float64."""
    (n, heads, _), (m, kv_heads, _) = q.shape, k.shape
    q, (k, v) = q.double(), (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    at, key = torch.arange(m - n, m).unsqueeze(1), torch.arange(m)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if causal:
        hidden |= key > at
    if window is not None:
        hidden |= (key - at).abs() >= window
    scores = (scale * torch.einsum("qhd,khd->qhk", q, k)).masked_fill(
        hidden.unsqueeze(1), -math.inf
    )
    weights = scores.softmax(-1).nan_to_num()  # of a row that sees nothing
    return torch.einsum("qhk,khd->qhd", weights, v), scores.logsumexp(-1)


def make(dtype, lens_q, lens_k, *, heads=4, kv_heads=2, dim=24, v_dim=24):
    generator = torch.Generator().manual_seed(len(lens_k) + dim)

    def noise(rows: int, num: int, width: int) -> Tensor:
        return torch.randn(rows, num, width, generator=generator).to(dtype)

    q = noise(sum(lens_q), heads, dim)
    k, v = noise(sum(lens_k), kv_heads, dim), noise(sum(lens_k), kv_heads, v_dim)
    cus = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k)]
    return q, k, v, *cus


def assert_right(run, dtype, lens_q, lens_k, *, causal, window, **shape) -> None:
    q, k, v, cu_q, cu_k = make(dtype, lens_q, lens_k, **shape)
    out, lse = run(q, k, v, cu_q, cu_k, causal=causal, scale=0.2, window=window)
    relative, of_lse = LIMITS[dtype]
    parts = zip(q.split(lens_q), k.split(lens_k), v.split(lens_k), strict=True)
    wanted = [oracle(*each, causal=causal, scale=0.2, window=window) for each in parts]
    expected, expected_lse = (torch.cat(each) for each in zip(*wanted, strict=True))
    error = (out.double() - expected).norm() / expected.norm()
    assert error < relative, error
    empty = expected_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert not out[empty].any()
    assert torch.allclose(lse[~empty].double(), expected_lse[~empty], atol=of_lse)


WINDOWS = (None, 1, 7, 65)


@pytest.mark.parametrize(
    ("run", "keys", "causal", "window"),
    [
        pytest.param(
            *(run, keys, causal, window),
            # Half of those that are interpreted hold every pair.
            marks=pytest.mark.slow if run is run_triton and (i + j + causal) % 2 else (),
        )
        for run in (ragged_attention, run_triton)
        for i, keys in enumerate(LENS_K)
        for causal in (False, True)
        for j, window in enumerate(WINDOWS)
    ],
)
def test_masks_and_lengths(run, keys: str, causal: bool, window: int | None) -> None:
    assert_right(run, torch.float32, LENS_Q, LENS_K[keys], causal=causal, window=window)


@RUNS
def test_more_requests_than_are_looked_at_together(run) -> None:
    lens, one = (1,) * 65 + (3,), {"heads": 1, "kv_heads": 1}
    assert_right(run, torch.float32, lens, lens, causal=True, window=None, **one)


@RUNS
def test_a_window_may_look_back_alone(run) -> None:
    """Of a full mask: what lies ahead is seen, however far."""
    q, k, v, cu, _ = make(torch.float32, (70,), (70,))
    out, lse = run(q, k, v, cu, cu, causal=False, scale=0.2, window=7, window_ahead=False)
    hidden = torch.ones(70, 70).tril(-7).bool()
    assert_masked(q, k, v, hidden, out, lse)


@RUNS
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 7])
def test_blocks_end_where_they_say(run, window, soft_cap) -> None:
    """One of 3 to 68, across two tiles; a window counts back from the row all the same."""
    q, k, v, cu, _ = make(torch.float32, (70,), (70,))
    ends = torch.arange(1, 71, dtype=torch.int32)
    ends[3:68] = 68
    blocks = torch.tensor([11], dtype=torch.int32), ends + 11  # as positions behind a prefix
    asked = {"causal": False, "window": window, "window_ahead": False, "soft_cap": soft_cap}
    out, lse = run(q, k, v, cu, cu, scale=0.2, blocks=blocks, **asked)
    hidden = torch.arange(70) >= ends.unsqueeze(1)
    if window is not None:
        hidden |= torch.ones(70, 70).tril(-window).bool()
    assert_masked(q, k, v, hidden, out, lse, soft_cap=soft_cap)


def assert_masked(q, k, v, hidden, out, lse, *, soft_cap=None) -> None:
    """Of one request, over dense scores in float64."""
    wide = (x.double().repeat_interleave(2, 1) for x in (k, v))
    q, k, v = q.double(), *wide
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(hidden, -math.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    assert (out.double() - expected).norm() / expected.norm() < 1e-5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).T, rtol=0.0, atol=1e-5)


@RUNS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(run, dtype) -> None:
    assert_right(run, dtype, (3, 65), (3, 65), causal=False, window=None)


@RUNS
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 6, "kv_heads": 1, "dim": 64, "v_dim": 32},
        {"heads": 3, "kv_heads": 3, "dim": 32, "v_dim": 80},
        {"heads": 8, "kv_heads": 2, "dim": 128, "v_dim": 128},
    ],
)
def test_heads_and_dims(run, shape) -> None:
    assert_right(run, torch.float32, (2, 66), (2, 66), causal=True, window=None, **shape)


@RUNS
def test_rows_of_a_fused_projection_are_read_where_they_lie(run) -> None:
    fused = torch.randn(40, 8, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = fused.split([4, 2, 2], dim=1)
    cu = torch.tensor([0, 17, 40], dtype=torch.int32)
    strided = run(q, k, v, cu, cu, causal=False, scale=0.25)
    packed = run(*(x.contiguous() for x in (q, k, v)), cu, cu, causal=False, scale=0.25)
    for a, b in zip(strided, packed, strict=True):
        assert torch.equal(a, b)


@RUNS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("keys", "dtype", "own"),
    [*((keys, F32, 24) for keys in LENS_K), ("more", torch.bfloat16, 32)],
)
def test_heads_may_share_columns_of_their_keys(run, keys, causal, dtype, own) -> None:
    """As if each had a copy, behind its own columns; of tiles that a mask divides or does not."""
    shape = {"heads": 2, "kv_heads": 2, "dim": own + 16, "v_dim": own}
    q, k, v, *cus = make(dtype, LENS_Q, LENS_K[keys], **shape)
    k[..., own:] = k[:, :1, own:]
    shared = SharedColumns(q[..., own:], k[:, 0, own:])
    asked = {"causal": causal, "scale": 0.2}
    found = run(q[..., :own], k[..., :own], v, *cus, shared=shared, out_dtype=F32, **asked)
    wanted = ragged_attention(q, k, v, *cus, out_dtype=F32, **asked)
    # Weights are rounded for the second product, where tiles are of 16 bits.
    bound = {"rtol": 0.0, "atol": 2e-6 if dtype is F32 else 2e-2}
    for each, other in zip(found, wanted, strict=True):
        assert each.dtype is F32
        torch.testing.assert_close(each, other, **bound)
    empty = wanted[1].isneginf()
    assert empty.any() == (keys == "fewer")
    assert not found[0][empty].any()


@RUNS
@pytest.mark.parametrize("lens", [(), (1,), (0, 64), (70, 3, 0)])
@pytest.mark.parametrize("behind", [1, 130])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 7), (False, 7)])
def test_rows_behind_the_last_request_have_no_keys(run, lens, behind, causal, window) -> None:
    q, k, v, cu, _ = make(torch.float32, (*lens, behind), (*lens, behind))
    cu = cu[:-1]
    out, lse = run(q, k, v, cu, cu, causal=causal, scale=0.2, window=window)
    end = sum(lens)
    assert not out[end:].any()
    assert lse[end:].isneginf().all()
    asked = {"causal": causal, "scale": 0.2, "window": window}
    alone = run(q[:end], k[:end], v[:end], cu, cu, **asked)
    for found, wanted in zip((out, lse), alone, strict=True):
        assert torch.equal(found[:end], wanted)


@RUNS
def test_nan_of_one_request_stays_there(run) -> None:
    q, k, v, cu, _ = make(torch.float32, (9, 9, 9), (9, 9, 9))
    whole = run(q, k, v, cu, cu, causal=False, scale=0.2)[0]
    v[9:18] = math.nan
    found = run(q, k, v, cu, cu, causal=False, scale=0.2)[0]
    assert found[9:18].isnan().all()
    assert torch.equal(found[:9], whole[:9])
    assert torch.equal(found[18:], whole[18:])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.zeros(3, 2, 8)}, r"^k must be \[keys, a divisor of 4, 16\]"),
        ({"k": torch.zeros(3, 3, 16), "v": torch.zeros(3, 3, 16)}, "^k must be"),
        ({"v": torch.zeros(3, 2, 16).half()}, "^v must be torch.float32"),
        ({"q": torch.zeros(3, 16, 4).mT}, "^q must be torch.float32"),
        ({"cu_k": torch.tensor([0, 3])}, r"^cu_k must be int32 \[2\]"),
        ({"blocks": (torch.zeros(1).int(), torch.zeros(3))}, "^visible_end must be contiguous"),
        ({"blocks": (torch.zeros(2).int(), torch.zeros(3).int())}, "^prefix_lens must be"),
        (
            {"shared": SharedColumns(torch.zeros(3, 4, 8), torch.zeros(3, 4))},
            r"^shared.k must be torch.float32 \[3, 8\]",
        ),
        (
            {"shared": SharedColumns(torch.zeros(3, 2, 8), torch.zeros(3, 8))},
            r"^shared.q must be torch.float32 \[3, 4, 8\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, text: str) -> None:
    cu = torch.tensor([0, 3], dtype=torch.int32)
    fine = {"q": torch.zeros(3, 4, 16), "k": torch.zeros(3, 2, 16), "v": torch.zeros(3, 2, 16)}
    asked = {**fine, "cu_q": cu, "cu_k": cu} | change
    with pytest.raises(KernelArgumentError, match=text):
        ragged_attention(**asked, causal=False, scale=1.0)
