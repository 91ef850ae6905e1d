"""The compiled kernels against their references, on memory that starts as NaN."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from paged_cases import BatchSpec, Shape, make_case, reference, worst_error
from paged_runs import run_decode

import attention_gate
import kernels_gate
import latent_attention
import uneven_lengths

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

Sweep = Callable[[str], Iterator[tuple[str, kernels_gate.Failure | None]]]
SWEEPS: dict[str, Sweep] = {
    "small ops": kernels_gate.check_small_ops,
    "attention": partial(attention_gate.check_attention, quick=False),
    "replay": attention_gate.check_replay,
}


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("sweep", SWEEPS)
def test_compiled_kernels_equal_their_references(sweep: str) -> None:
    torch.manual_seed(0)
    found = list(SWEEPS[sweep]("cuda"))
    assert found
    assert [failure for _, failure in found if failure is not None] == []


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("case", [(16, 1, 1100), (16, 64, 300), (128, 3, 1100), (128, 40, 70)])
def test_decodes_over_latents_of_real_widths_meet_the_definition(
    case: tuple[int, int, int],
) -> None:
    """Heads, requests, keys; rows in bfloat16 and in float8."""
    work = latent_attention.make_work(*case, torch.device("cuda"))
    for run, cache in (
        (latent_attention.ours(work), work.cache(0)),
        (latent_attention.ours_scaled(work), work.scaled[0]),
    ):
        error = latent_attention.worst_error(work, cache, run(0))
        assert error <= latent_attention.ERROR_LIMIT


@pytest.mark.parametrize("count", [40, 80, 128, 224, 256])
@pytest.mark.parametrize("between", [(190, 191), (16, 2400)])
def test_decodes_of_many_requests_meet_the_definition(count: int, between: tuple[int, int]) -> None:
    """Programs of two warps, and from 65 requests on of one; of even lengths one for each request
    and head, of uneven ones more."""
    lens = uneven_lengths.log_uniform(count, *between)
    device = torch.device("cuda")
    world = uneven_lengths.World(lens, [1] * count, device)
    q = torch.randn(count, uneven_lengths.HEADS, uneven_lengths.DIM, device=device).bfloat16()
    for _ in range(2):
        assert world.worst_error(q) <= uneven_lengths.ERROR_LIMIT
        assert not world.workspace.finished.any()


@pytest.mark.parametrize(
    ("count", "heads", "dim"),
    [
        (1, (32, 4), 128),
        (1, (32, 8), 64),
        (4, (32, 8), 64),
        (40, (32, 8), 64),
        (72, (32, 8), 64),
        (150, (32, 4), 128),
    ],
    ids=str,
)
def test_decodes_by_each_row_of_the_tile_table_meet_the_definition(
    count: int, heads: tuple[int, int], dim: int
) -> None:
    """A request alone, many splits of narrow heads, programs of one warp."""
    lens = uneven_lengths.log_uniform(count, 300, 1400)
    batch = BatchSpec(prefix_lens=tuple(n - 1 for n in lens), extend_lens=(1,) * count)
    num_heads, kv_heads = heads
    shape = Shape(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=torch.bfloat16,
    )
    case = make_case(batch, shape, seed=7, device="cuda")
    out, lse = run_decode(case)
    assert worst_error(case, out) <= 1.0
    torch.testing.assert_close(lse, reference(case)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("nan_memory")
def test_uninitialised_memory_is_nan() -> None:
    x = torch.ones(2, 3, device="cuda")
    assert torch.empty(7, device="cuda").isnan().all()
    assert torch.empty_like(x).isnan().all()
    assert x.new_empty(5).isnan().all()
