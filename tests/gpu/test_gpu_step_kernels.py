"""derive, commit and greedy, compiled, against their references at the sizes of real steps."""

import pytest
import torch
from step_cases import (
    LARGE,
    SMALL,
    StepShape,
    derived,
    differences,
    make_commit,
    make_rows,
    make_view,
    moved,
)

from paceline.kernels._triton.keep_states import launch_keep_states
from paceline.kernels.commit import (
    CommittedRows,
    EndRules,
    SampledTokens,
    commit,
    commit_reference,
)
from paceline.kernels.derive import TableRows, derive_rows
from paceline.kernels.greedy import greedy, greedy_reference
from paceline.kernels.keep_states import keep_states_reference

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SHAPES = pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=lambda shape: shape.name)


@SHAPES
def test_derive_equals_its_reference(shape: StepShape) -> None:
    for seed in range(3):
        rows, view = make_rows(shape, seed=seed), make_view(shape, "cuda")
        derive_rows(
            TableRows(*moved(rows, "cuda")),
            view,
            page_sizes=shape.page_sizes,
            offsets=torch.arange(sum(shape.strides), dtype=torch.int32, device="cuda"),
        )
        assert differences(view, derived(shape, rows)) == []


@SHAPES
def test_commit_equals_its_reference(shape: StepShape) -> None:
    for seed in range(3):
        rows, ends, step, results = make_commit(shape, seed=seed)
        device_rows = CommittedRows(*moved(rows, "cuda"))
        device_ends, device_step = (
            EndRules(*moved(ends, "cuda")),
            SampledTokens(*moved(step, "cuda")),
        )
        device_results = results.cuda()
        commit(device_rows, device_ends, device_step, device_results)
        commit_reference(rows, ends, step, results)
        assert torch.equal(device_results.cpu(), results)
        for name, mine, theirs in zip(CommittedRows._fields, device_rows, rows, strict=True):
            assert torch.equal(mine.cpu(), theirs), name


@pytest.mark.parametrize("reqs", [1, 8, 256])
@pytest.mark.parametrize("width", [3, 5000])
def test_keep_states_equals_its_reference(reqs: int, width: int) -> None:
    generator = torch.Generator().manual_seed(reqs * width)
    num_slots = 3 * reqs + 1
    slots = 1 + torch.randperm(3 * reqs, generator=generator).view(reqs, 3).int()
    slots[reqs // 2] = 0
    results = torch.randint(0, 4, (reqs, 5), generator=generator).int()  # of a round
    prefix_lens = torch.randint(0, 90, (reqs,), generator=generator).int()
    ends = []
    for run, device in ((keep_states_reference, "cpu"), (launch_keep_states, "cuda")):
        numbers = torch.arange(2 * num_slots * width, device=device).view(2, num_slots, width)
        parts = [numbers.remainder(199).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
        lens = torch.full((num_slots,), 77, dtype=torch.int32, device=device)
        told = torch.zeros(reqs, dtype=torch.int32, device=device)
        given = [each.to(device) for each in (prefix_lens, slots, results)]
        run(parts, lens, *given[:2], given[2][:, 0], 4, told)
        ends.append([each.cpu() for each in (*(part[:, 1:] for part in parts), lens, told)])
    for wanted, found in zip(*ends, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("vocab", [1, 4096, 4097, 50257, 128256, 262144])
@pytest.mark.parametrize("rows", [1, 3, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_equals_its_reference(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Few distinct values, so that most rows have ties, in one block and across blocks."""
    generator = torch.Generator("cuda").manual_seed(rows * vocab)
    steps = torch.randint(-60, 61, (rows, vocab), generator=generator, device="cuda")
    logits = (steps / 4).to(dtype)
    for row, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
        if rows > 3:
            logits[row, (row * 4999) % vocab] = bad
    token_ids, finite = greedy(logits)
    wanted_ids, wanted_finite = greedy_reference(logits.cpu())
    assert torch.equal(token_ids.cpu(), wanted_ids)
    assert torch.equal(finite.cpu(), wanted_finite)


def test_a_replay_follows_what_the_device_holds() -> None:
    """A captured derive, greedy and commit advance by one token with each replay."""
    shape = LARGE[0]
    rows = make_rows(shape, seed=0)
    rows.facts[:, 2] = 1
    rows.finish.zero_()
    rows.kv_committed.clamp_(max=shape.max_tokens - 10)
    committed, reqs = rows.kv_committed.clone(), len(shape.strides)
    device_rows = TableRows(*moved(rows, "cuda"))
    view = make_view(shape, "cuda")
    logits = torch.zeros(reqs, 1000, device="cuda")
    logits[:, 7] = 1.0
    ends = EndRules(
        torch.full((shape.num_rows, 4), -1, device="cuda"),
        torch.full((shape.num_rows,), shape.max_tokens, device="cuda"),
    )
    results = torch.zeros(reqs, 3, dtype=torch.int32, device="cuda")
    offsets = torch.arange(reqs, dtype=torch.int32, device="cuda")

    def step() -> None:
        derive_rows(device_rows, view, page_sizes=shape.page_sizes, offsets=offsets)
        token_ids, finite = (column.view(reqs, 1) for column in greedy(logits))
        facts = device_rows.facts[:reqs]
        tokens = SampledTokens(facts, view.row_ids, view.kv_lens, token_ids, finite)
        columns = (device_rows.kv_committed, device_rows.finish, device_rows.token_ids)
        commit(CommittedRows(*columns), ends, tokens, results)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    live = rows.facts[: len(shape.extend_lens), 0].long()
    advanced = device_rows.kv_committed.cpu()
    assert torch.equal(advanced[live], committed[live] + 4)
    for row in live.tolist():
        first = int(committed[row]) + 1
        assert device_rows.token_ids[row, first : first + 4].tolist() == [7] * 4
    assert device_rows.kv_committed[0] == 1
