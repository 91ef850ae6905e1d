"""merge_partials, the op and its Triton kernel, against one softmax over all keys in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.merge_partials import merge_partials

TOKENS, HEADS, DIM = 3, 5, 24
NAN, NO_KEYS = float("nan"), -math.inf


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Two parts of one attention, and what the whole is."""

    out_a: Tensor  # [tokens, heads, dim]
    lse_a: Tensor  # [tokens, heads]  float32
    out_b: Tensor  # [tokens, heads, dim]
    lse_b: Tensor  # [tokens, heads]  float32
    sinks: Tensor | None  # [heads]  float32
    whole: Tensor  # [tokens, heads, dim]  float64
    whole_lse: Tensor  # [tokens, heads]  float64


def parts(
    *,
    sinks: bool = False,
    shift: float = 0.0,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    seed: int = 0,
) -> Parts:
    """Random scores of 9 and 4 keys around `shift`; the parts are slices of wider tensors,
    each with strides of its own."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(TOKENS, HEADS, 13, generator=random).double() * 2.0 + shift
    values = torch.randn(TOKENS, HEADS, 13, DIM, generator=random).double() * 4.0
    sink = torch.randn(HEADS, generator=random) + shift if sinks else None

    def attend(keys: slice, sink: Tensor | None) -> Tensor:
        logits = scores[:, :, keys]
        if sink is not None:
            logits = torch.cat((sink.double().view(1, -1, 1).expand(TOKENS, -1, 1), logits), 2)
        weights = logits.softmax(2)[:, :, -values[:, :, keys].shape[2] :]
        return torch.einsum("thk,thkd->thd", weights, values[:, :, keys])

    def strided(out: Tensor, dtype: torch.dtype, beside: int) -> Tensor:
        wide = torch.full((TOKENS, HEADS + 1, DIM + beside), NAN, dtype=dtype)
        wide[:, 1:, :DIM] = out.to(dtype)
        return wide[:, 1:, :DIM]

    first, second = slice(0, 9), slice(9, 13)
    return Parts(
        out_a=strided(attend(first, None), dtypes[0], 8),
        lse_a=scores[:, :, first].logsumexp(2).float(),
        out_b=strided(attend(second, None), dtypes[1], 16),
        lse_b=scores[:, :, second].logsumexp(2).float(),
        sinks=sink,
        whole=attend(slice(0, 13), sink),
        whole_lse=scores.logsumexp(2),
    )


def run_op(case: Parts, out: Tensor, lse: Tensor) -> None:
    merge_partials(
        case.out_a, case.lse_a, case.out_b, case.lse_b, sinks=case.sinks, out=out, lse=lse
    )


def run_triton(case: Parts, out: Tensor, lse: Tensor) -> None:
    from paceline.kernels._triton.merge_partials import launch_merge_partials

    launch_merge_partials(
        case.out_a, case.lse_a, case.out_b, case.lse_b, sinks=case.sinks, out=out, lse=lse
    )


Run = Callable[[Parts, Tensor, Tensor], None]
both = pytest.mark.parametrize("run", [run_op, run_triton], ids=["op", "triton"])


def merged(run: Run, case: Parts, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    out = torch.full((TOKENS, HEADS, DIM), NAN, dtype=dtype)
    lse = torch.full((TOKENS, HEADS), NAN)
    run(case, out, lse)
    return out, lse


@both
@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_two_parts_give_the_softmax_over_all_keys(run: Run, sinks: bool, shift: float) -> None:
    """exp(300) is no float32: only differences may be raised."""
    case = parts(sinks=sinks, shift=shift)
    out, lse = merged(run, case)
    torch.testing.assert_close(out.double(), case.whole, rtol=0.0, atol=2e-3 if shift else 2e-5)
    torch.testing.assert_close(lse.double(), case.whole_lse, rtol=1e-6, atol=1e-6)
    halves = (case.out_a.double() + case.out_b.double()) / 2
    assert (halves - case.whole).abs().max() > 1.0


@both
def test_the_sink_counts_in_the_denominator_once_and_in_no_lse(run: Run) -> None:
    case = parts(sinks=True)
    assert case.sinks is not None
    out, lse = merged(run, case)
    plain, plain_lse = merged(run, replace(case, sinks=None))
    assert torch.equal(lse, plain_lse)
    share = torch.sigmoid(plain_lse - case.sinks).unsqueeze(-1)  # e^lse / (e^lse + e^sink)
    torch.testing.assert_close(out, plain * share, rtol=1e-5, atol=1e-5)
    assert share.min() < 0.9


@both
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_part_without_keys_has_no_weight_whatever_it_holds(run: Run, sinks: bool) -> None:
    case = parts(sinks=sinks)
    case.lse_a[0] = NO_KEYS
    case.out_a[0] = NAN
    case.lse_b[1] = NO_KEYS
    case.out_b[1] = math.inf
    out, lse = merged(run, case)
    share = torch.ones(TOKENS, HEADS)
    if case.sinks is not None:
        share = torch.sigmoid(lse - case.sinks)
    torch.testing.assert_close(out[0], case.out_b[0] * share[0].unsqueeze(-1))
    torch.testing.assert_close(out[1], case.out_a[1] * share[1].unsqueeze(-1))
    torch.testing.assert_close(lse[:2], torch.stack((case.lse_b[0], case.lse_a[1])))


@both
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_no_keys_at_all_give_zeros_and_no_lse(run: Run, sinks: bool) -> None:
    case = parts(sinks=sinks)
    for part, lse in ((case.out_a, case.lse_a), (case.out_b, case.lse_b)):
        part[2] = NAN
        lse[2] = NO_KEYS
    out, total = merged(run, case)
    assert out[2].eq(0).all()
    assert total[2].isneginf().all()
    assert out[:2].isfinite().all()


@both
@pytest.mark.parametrize("where", ["out_a", "out_b", "lse_a", "lse_b"])
def test_a_number_that_is_not_finite_stays_visible_and_in_its_row(run: Run, where: str) -> None:
    case = parts()
    getattr(case, where)[1] = NAN
    out, _ = merged(run, case)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@both
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_parts_of_any_dtype_are_merged_in_float32(
    run: Run, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> None:
    case = parts(dtypes=dtypes[:2], sinks=True)
    out, _ = merged(run, case, dtypes[2])
    widest = max(torch.finfo(dtype).eps for dtype in dtypes)
    torch.testing.assert_close(out.double(), case.whole, rtol=2 * widest, atol=16 * widest)


@both
@pytest.mark.parametrize("into", ["a", "b"])
def test_the_result_may_replace_either_part(run: Run, into: str) -> None:
    expected, expected_lse = merged(run, parts(sinks=True))
    case = parts(sinks=True)
    out, lse = (case.out_a, case.lse_a) if into == "a" else (case.out_b, case.lse_b)
    run(case, out, lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_no_tokens_merge_into_none() -> None:
    nothing, no_lse = torch.empty(0, HEADS, DIM), torch.empty(0, HEADS)
    merge_partials(nothing, no_lse, nothing, no_lse, out=nothing, lse=no_lse)


BAD: dict[str, tuple[dict[str, Tensor], str]] = {
    "dtype": (
        {"out_b": torch.zeros(TOKENS, HEADS, DIM, dtype=torch.float64)},
        r"out_b must be float32, bfloat16 or float16 \[3, 5, 24\] on cpu",
    ),
    "shape": ({"out": torch.zeros(TOKENS, HEADS, DIM - 1)}, r"out must be float32, bfloat16 or"),
    "stride": (
        {"out_a": torch.zeros(TOKENS, DIM, HEADS).transpose(1, 2)},
        "out_a must be .* with a contiguous last dimension, got float32",
    ),
    "orientation": (
        {"lse_b": torch.zeros(HEADS, TOKENS)},
        r"lse_b must be contiguous float32 \[3, 5\] on cpu, got float32 \[5, 3\]",
    ),
    "transposed": ({"lse_a": torch.zeros(HEADS, TOKENS).T}, "lse_a must be contiguous float32"),
    "half": ({"lse": torch.zeros(TOKENS, HEADS).half()}, "lse must be contiguous float32"),
    "sinks": ({"sinks": torch.zeros(HEADS + 1)}, r"sinks must be contiguous float32 \[5\] on cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_argument_that_does_not_fit_is_named(name: str) -> None:
    changed, text = BAD[name]
    case = parts(sinks=True)
    given = {
        "out_a": case.out_a,
        "lse_a": case.lse_a,
        "out_b": case.out_b,
        "lse_b": case.lse_b,
        "sinks": case.sinks,
        "out": torch.zeros(TOKENS, HEADS, DIM),
        "lse": torch.zeros(TOKENS, HEADS),
    } | changed
    with pytest.raises(KernelArgumentError, match=text):
        merge_partials(**given)  # type: ignore[arg-type]
