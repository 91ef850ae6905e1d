"""eagle_input: the op and its Triton kernel against transformers' norm over looked-up rows."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline.core.errors import KernelArgumentError
from paceline.kernels.eagle_input import HalfNorms, eagle_input, eagle_input_reference

EPS = 1e-5
DIM = 72
IDS = torch.tensor([4, 0, 12, 4, 7])


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, HalfNorms]:
    """(table, features, norms)."""
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    norms = HalfNorms(noise(DIM), noise(DIM), EPS)
    return noise(13, DIM) * 3.0, noise(len(IDS), DIM) * 0.2, norms


def expected(table: Tensor, features: Tensor, norms: HalfNorms) -> Tensor:
    halves = []
    for x, weight in ((table[IDS], norms.embedding), (features, norms.feature)):
        module = LlamaRMSNorm(DIM, eps=EPS).to(weight.dtype)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        halves.append(module(x))
    return torch.cat(halves, dim=1)


def run_triton(table: Tensor, features: Tensor, norms: HalfNorms) -> Tensor:
    from paceline.kernels._triton.eagle_input import launch_eagle_input

    out = torch.full((len(IDS), 2 * DIM), float("nan"), dtype=features.dtype)
    launch_eagle_input(IDS, table, features, norms, out=out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", ["reference", "op", "triton"])
def test_halves_are_the_norms_of_embedding_and_feature(run: str, dtype: torch.dtype) -> None:
    table, features, norms = operands(dtype)
    runs = {
        "reference": lambda: eagle_input_reference(IDS, table, features, norms),
        "op": lambda: eagle_input(IDS, table, features, norms),
        "triton": lambda: run_triton(table, features, norms),
    }
    ulps = {"reference": 0, "op": 2, "triton": 4}[run]
    rtol = ulps * torch.finfo(dtype).eps
    wanted = expected(table, features, norms)
    torch.testing.assert_close(runs[run](), wanted, rtol=rtol, atol=1e-6 if ulps else 0.0)


@pytest.mark.parametrize("run", [eagle_input, lambda _, *rest: run_triton(*rest)])
def test_rows_may_be_strided(run: object) -> None:
    table, features, norms = operands(torch.float32)
    wide = torch.full((len(IDS), 3 * DIM), float("nan"))
    wide[:, DIM : 2 * DIM] = features
    tall = torch.full((13, 2 * DIM), float("nan"))
    tall[:, :DIM] = table
    assert callable(run)
    actual = run(IDS, tall[:, :DIM], wide[:, DIM : 2 * DIM], norms)
    torch.testing.assert_close(actual, expected(table, features, norms), rtol=1e-6, atol=1e-6)


def test_a_cpu_takes_a_table_that_is_stored_by_columns() -> None:
    table, features, norms = operands(torch.float32)
    by_columns = table.T.contiguous().T
    wanted = eagle_input(IDS, table, features, norms)
    assert torch.equal(eagle_input(IDS, by_columns, features, norms), wanted)


def test_a_step_without_tokens_is_empty() -> None:
    table, features, norms = operands(torch.float32)
    assert eagle_input(IDS[:0], table, features[:0], norms).shape == (0, 2 * DIM)


def test_a_bad_argument_is_named_with_what_was_expected() -> None:
    table, features, norms = operands(torch.float32)
    with pytest.raises(KernelArgumentError, match=r"table must be \[vocab, dim\], on a GPU with"):
        eagle_input(IDS, table.flatten(), features, norms)
    with pytest.raises(KernelArgumentError, match=r"features must be torch.float32 \[tokens, 72\]"):
        eagle_input(IDS, table, features.bfloat16(), norms)
    with pytest.raises(KernelArgumentError, match=r"input_ids must be int64 \[5\], got int32 \[5"):
        eagle_input(IDS.int(), table, features, norms)
    with pytest.raises(KernelArgumentError, match=r"norms.feature must be torch.float32 \[72\]"):
        eagle_input(IDS, table, features, norms._replace(feature=torch.ones(71)))
