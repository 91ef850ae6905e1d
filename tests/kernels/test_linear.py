"""linear against float64, on both sides of the switch between library paths; what of ours runs."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from operators import Operators
from torch import Tensor

from paceline.core.gpus import GPUS
from paceline.kernels.linear import (
    LEAST_ADDED,
    add_linear,
    fits_add_linear,
    gated_linear,
    linear,
    linear_reference,
    linear_then,
)
from paceline.kernels.linear_cpu import is_by_columns, linear_cpu
from paceline.kernels.openblas import fits_openblas, openblas_linear, set_num_threads
from paceline.kernels.stand_in import StandIn
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement, empty_matrix
from paceline.plan.memory.rehearsal import Allocations
from paceline.runner.recording.recorded import RecordedGraph

TOKENS = [0, 1, 2, 3, 4, 7, 16, 33, 64]
IN, OUT = 72, 40


def operands(tokens: int, dtype: torch.dtype, order: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, a slice of a wider row; the weight, stored by rows or by columns; the bias."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, IN + 8, generator=generator).to(dtype)[:, 4:-4]
    weight = torch.randn(OUT, IN, generator=generator).to(dtype)
    if order == "columns":
        weight = weight.t().contiguous().t()
    return x, weight, torch.randn(OUT, generator=generator).to(dtype)


def assert_within_roundings(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """float32 accumulation rounds once a term; the result is rounded once to its dtype."""
    exact = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().t() + 8.0
    limit = IN * torch.finfo(torch.float32).eps * terms
    limit += torch.finfo(actual.dtype).eps * exact.abs()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("function", [linear, linear_reference])
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_equals_float64(
    tokens: int, dtype: torch.dtype, has_bias: bool, order: str, function: object
) -> None:
    x, weight, bias = operands(tokens, dtype, order)
    used = bias if has_bias else None
    kept = [tensor.clone() for tensor in (x, weight, bias)]
    out = function(x, weight, used)
    assert out.dtype is dtype
    assert_within_roundings(out, x, weight, used)
    assert all(map(torch.equal, kept, (x, weight, bias)))  # nothing is mutated


@pytest.fixture
def threads() -> Iterator[None]:
    """A process that computes with one thread, and may change that."""
    kept = torch.get_num_threads()
    set_num_threads(1)
    yield
    set_num_threads(kept)


NUMPYS = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
OPENBLAS = pytest.mark.skipif(NUMPYS != "scipy-openblas", reason=f"numpy's BLAS is {NUMPYS}")


@OPENBLAS
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_openblas_equals_float64_and_a_replay_equals_it(
    tokens: int, has_bias: bool, threads: None
) -> None:
    x, weight, bias = operands(tokens, torch.float32, "columns")
    used = bias if has_bias else None
    out, graph = openblas_linear(x, weight, used), RecordedGraph(poison=True)
    assert_within_roundings(out, x, weight, used)
    replayed = torch.empty_like(out)
    graph.capture(lambda: replayed.copy_(openblas_linear(x, weight, used)))
    replayed.fill_(math.nan)
    graph.replay()
    assert torch.equal(replayed, out)


@OPENBLAS
def test_openblas_heeds_no_error_state_of_the_caller(threads: None) -> None:
    x, weight = torch.full((1, 8), 1e-30), torch.full((8, 8), 1e-15).t()
    weight[0, 0] = math.inf
    x[0, 0] = 0.0
    with np.errstate(all="raise"):
        out = openblas_linear(x, weight, torch.zeros(8))
    assert out[0, 0].isnan()
    assert 0 < out[0, 1] < torch.finfo(torch.float32).tiny


@OPENBLAS
@pytest.mark.parametrize("tokens", TOKENS)
def test_openblas_has_small_products_of_one_thread_alone(
    tokens: int, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.kernels.openblas.has_avx512", lambda: True)
    x, weight, _ = operands(tokens, torch.float32, "columns")
    huge = torch.empty(1 << 11, 1 << 11).t()
    assert fits_openblas(x, weight) == (tokens > 0)
    assert fits_openblas(x, huge) == (tokens == 1)
    assert not fits_openblas(x, weight.contiguous())
    assert not fits_openblas(x[None], weight)
    assert not fits_openblas(x.bfloat16(), weight.bfloat16())
    set_num_threads(2)
    assert not fits_openblas(x, weight)


@pytest.mark.parametrize("block", [1, 100, 1 << 19])
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_an_emulated_product_equals_float64_in_blocks_of_any_size(
    tokens: int, has_bias: bool, order: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.kernels.linear_cpu._BLOCK", block)
    x, weight, bias = operands(tokens, torch.bfloat16, order)
    out = linear_cpu(x, weight, bias if has_bias else None)
    assert out.dtype is torch.bfloat16
    assert_within_roundings(out, x, weight, bias if has_bias else None)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_one_thread_stores_emulated_matrices_by_columns(
    threads: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.layers.weights.parameter.is_emulated", lambda dtype: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    placement = Placement(torch.device("cpu"), torch.bfloat16, DENSE)
    weight = empty_matrix(6, 4, placement=placement, has_bias=has_bias)
    assert weight.shape == (6, 4)
    assert is_by_columns(weight) == (threads == 1 and not has_bias)


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_a_recorded_emulated_product_is_the_eager_one(tokens: int, order: str) -> None:
    x, weight, bias = operands(tokens, torch.bfloat16, order)
    out = torch.zeros(tokens, OUT, dtype=torch.bfloat16)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: out.copy_(linear_cpu(x, weight, bias)))
    x.mul_(-3.0)
    graph.replay()
    assert torch.equal(out, linear_cpu(x, weight, bias))


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("tokens", [2, 3, 16])
def test_a_recorded_linear_follows_its_input(tokens: int, order: str) -> None:
    x, weight, bias = operands(tokens, torch.float32, order)
    out = torch.zeros(tokens, OUT)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: out.copy_(linear(x, weight, bias)))
    assert_within_roundings(out, x, weight, bias)
    x.mul_(-3.0)
    graph.replay()
    assert_within_roundings(out, x, weight, bias)


@pytest.mark.parametrize(
    ("function", "tokens", "rows", "ran"),
    [
        (gated_linear, 64, 48, ["skinny_linear"]),
        (gated_linear, 2047, 48, ["act_and_mul"]),
        (gated_linear, 2048, 48, ["activated_linear"]),
        (gated_linear, 2048, 24, ["act_and_mul"]),  # rows of 12 gates do not lie as they must
        (linear_then, 64, 48, ["skinny_linear"]),
        (linear_then, 2047, 48, []),
        (linear_then, 2048, 48, ["activated_linear"]),
        (linear_then, 2048, 24, ["activated_linear"]),
    ],
)
def test_an_activation_behind_many_tokens_is_in_their_product(
    function: Callable[..., Tensor], tokens: int, rows: int, ran: list[str]
) -> None:
    made = {"device": "meta", "dtype": torch.bfloat16}
    x, weight = torch.empty(tokens, 256, **made), torch.empty(rows, 256, **made)
    with StandIn("cuda", None, (9, 0)), Operators() as seen:
        out = function(x, weight, None, "silu")
    ours = [name for name in seen.names if name.startswith("paceline::")]
    assert ours == [f"paceline::{name}" for name in ran]
    assert out.shape == (tokens, rows // 2 if function is gated_linear else rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_is_added_to_a_stream_in_place(dtype: torch.dtype) -> None:
    x, weight, _ = operands(33, dtype, "rows")
    stream = torch.randn(33, OUT, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, kept = stream.double(), [tensor.clone() for tensor in (x, weight)]
    add_linear(x, weight, stream)
    product = x.double() @ weight.double().t()
    terms = x.double().abs() @ weight.double().abs().t()
    limit = IN * torch.finfo(torch.float32).eps * (terms + before.abs())
    limit += torch.finfo(dtype).eps * (product.abs() + (before + product).abs())
    assert ((stream.double() - before - product).abs() <= limit).all()
    assert all(map(torch.equal, kept, (x, weight)))  # nothing else is mutated


def test_a_recorded_product_is_added_to_what_the_stream_is_then() -> None:
    x, weight, stream = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, 5)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: add_linear(x, weight, stream))
    for value in (2.0, -3.0):
        x.fill_(value)
        stream.fill_(1.0)
        graph.replay()
        assert (stream == 1.0 + 4 * value).all()


def test_many_tokens_are_added_in_place_on_hopper() -> None:
    def fits(tokens=LEAST_ADDED, dtype=torch.bfloat16, arch=(9, 0)) -> bool:
        with StandIn("cpu" if arch is None else "cuda", 132, arch):
            return fits_add_linear(torch.empty(tokens, 128, device="meta", dtype=dtype))

    assert fits()
    assert fits(dtype=torch.float16)
    assert not fits(tokens=LEAST_ADDED - 1)
    assert not fits(dtype=torch.float32)
    assert not fits(arch=(10, 0))
    assert not fits(arch=None)


def test_a_product_in_the_stream_is_rehearsed_without_memory_of_its_own() -> None:
    x, weight, stream = (torch.empty(shape, device="meta") for shape in ((3, 4), (5, 4), (3, 5)))
    with Allocations(GPUS["h200"]) as seen:
        add_linear(x, weight, stream)
        assert seen.total == 0
        stream += linear(x, weight, None)
    assert seen.total == stream.nbytes
