"""The kernels around verification, compiled: against the plain walk, and against their references
at the sizes of real rounds.
"""

from collections.abc import Sequence

import pytest
import torch
from commit_cases import (
    Round,
    assert_same,
    make_round,
    random_requests,
    small_trees,
    walk,
    wanted_after,
)
from pass_cases import PassShape, make_base, make_view, on_device
from step_cases import differences
from torch import Tensor

from paceline.kernels.chain_rows import ChainRows, StepRows, chain_rows
from paceline.kernels.commit import Accepted, CommittedRows, Drafts, EndRules, SampledTokens, commit
from paceline.kernels.compact_kv import compact_kv
from paceline.kernels.derive import derive_rows

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
# Rows, longest path, whether a chain.
ROUNDS = [(2, 2, True), (4, 4, True), (8, 8, True), (8, 4, False), (33, 5, False), (64, 9, False)]


def on_gpu(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def on_cpu(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors if tensor is not None]


def commit_on_gpu(made: Round) -> dict[str, Tensor]:
    """What it wrote, on the CPU again."""
    device = Round(
        CommittedRows(*on_gpu(made.rows)),
        EndRules(*on_gpu(made.ends)),
        SampledTokens(*on_gpu(made.sampled)),
        made.results.to(DEVICE),
        Drafts(*on_gpu(made.drafts)),
        Accepted(*on_gpu(made.accepted)),
    )
    commit(*device)
    return {name: tensor.cpu() for name, tensor in device.written().items()}


@pytest.mark.parametrize(("n", "max_path", "chains"), ROUNDS)
def test_commit_walks_as_plain_python_does(n: int, max_path: int, chains: bool) -> None:
    requests = random_requests(500, n, chains=chains, seed=n)
    made = make_round(requests, max_path, chains=chains)
    wanted = wanted_after(made, [walk(request, max_path) for request in requests])
    assert_same(commit_on_gpu(made), wanted)


def test_commit_walks_every_small_tree() -> None:
    requests = list(small_trees(4))
    made = make_round(requests, 4, chains=False)
    wanted = wanted_after(made, [walk(request, 4) for request in requests])
    assert_same(commit_on_gpu(made), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (80, 96), (9, 5)])
def test_compact_kv_equals_its_reference(dtype: torch.dtype, dim: int, v_dim: int) -> None:
    """Again and again over the same pools: a slot read too late would show."""
    generator = torch.Generator().manual_seed(dim)
    reqs, n, max_path, pages, page_size = 33, 16, 8, 50, 16
    pools = [
        torch.randint(0, 120, (5, pages, page_size, 8, size), generator=generator).to(dtype)
        for size in (dim, v_dim)
    ]
    device_pools = [pool.to(DEVICE) for pool in pools]
    for _ in range(4):
        slots = page_size + torch.randperm((pages - 1) * page_size, generator=generator)
        loc = slots[: reqs * n].view(reqs, n).contiguous()
        loc[-1] = 0
        later = torch.rand(reqs, n - 1, generator=generator).argsort(1)[:, : max_path - 1]
        path = torch.nn.functional.pad(1 + later.sort(1).values, (1, 0))
        path[-2:] = torch.arange(max_path)
        compact_kv(pools, loc, path)
        compact_kv(device_pools, loc.to(DEVICE), path.to(DEVICE))
        for found, wanted in zip(device_pools, pools, strict=True):
            assert torch.equal(found.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("page_sizes", [(16,), (1, 64), (5, 16, 1)], ids=str)
@pytest.mark.parametrize(("rows", "is_tree"), [(1, False), (6, False), (1, True), (57, True)])
def test_a_pass_equals_its_reference(rows: int, is_tree: bool, page_sizes: tuple[int, ...]) -> None:
    shape = PassShape(29, rows, is_tree=is_tree, advance=2, page_sizes=page_sizes)
    base = make_base(shape, seed=rows)
    device_base = on_device(base, DEVICE)
    found, wanted = make_view(shape, device_base), make_view(shape, base)
    for one, view in ((device_base, found), (base, wanted)):
        device = one.row_ids.device
        offsets = torch.arange(view.padded_tokens, dtype=torch.int32, device=device)
        derive_rows(one.source, view, page_sizes=page_sizes, offsets=offsets)
    assert differences(found, wanted) == []


@pytest.mark.parametrize(("reqs", "n", "max_path"), [(1, 1, None), (64, 8, 5), (300, 60, 6)])
def test_chain_rows_equals_its_reference(reqs: int, n: int, max_path: int | None) -> None:
    generator = torch.Generator().manual_seed(reqs)
    tokens, width = reqs * n, 131_072
    history = torch.randint(0, 2**31 - 1, (40, width), generator=generator, dtype=torch.int32)
    rows = StepRows(
        row_ids=torch.randint(0, 40, (reqs,), generator=generator),
        req_ids=torch.arange(reqs).repeat_interleave(n),
        positions=torch.randint(width - 5, width + 2, (tokens,), generator=generator),
    )
    state = torch.randint(width - 6, width, (40, 2), generator=generator, dtype=torch.int32)
    path = None
    if max_path is not None:
        path = torch.rand(reqs, n, generator=generator).argsort(1)[:, :max_path].contiguous()
    wanted = ChainRows(torch.full((tokens,), -7), torch.full((tokens,), -7))
    found = ChainRows(*on_gpu(wanted))
    chain_rows(history, state[:, 0], rows, wanted, path=path)
    device_path = None if path is None else path.to(DEVICE)
    device_rows = StepRows(*on_gpu(rows))
    chain_rows(history.to(DEVICE), state.to(DEVICE)[:, 0], device_rows, found, path=device_path)
    assert all(map(torch.equal, on_cpu(found), on_cpu(wanted)))
