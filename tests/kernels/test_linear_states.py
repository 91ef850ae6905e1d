"""Rows over states, their commit and their convolution, against recurrences in float64, step by
step, and against published numbers."""

import math
import random

import pytest
import torch
from torch import Tensor

from paceline.kernels.commit_states import commit_states_reference
from paceline.kernels.conv_rows import conv_rows_reference, next_windows_reference, places_of
from paceline.kernels.extend_states import Chunks, StateRows, extend_states_reference

KEY_HEADS, PER_KEY, KEY_DIM, VALUE_DIM = 2, 3, 5, 4
HEADS = KEY_HEADS * PER_KEY


def golden(seed: int, *shape: int) -> Tensor:
    """sin(0.7 seed + 1.3 k) in C order, float64."""
    at = torch.arange(math.prod(shape), dtype=torch.float64)
    return (0.7 * seed + 1.3 * at).sin().view(shape)


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def random_rows(num: int, *, delta: bool) -> StateRows:
    return StateRows(
        q=torch.randn(num, KEY_HEADS, KEY_DIM),
        k=unit(torch.randn(num, KEY_HEADS, KEY_DIM)),
        v=torch.randn(num, HEADS, VALUE_DIM),
        decay=-torch.rand(num, HEADS),
        beta=torch.rand(num, HEADS) if delta else None,
    )


def one_row(rows: StateRows, index: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """(the state behind a row, what it reads), float64.  state: [heads, key_dim, value_dim]."""
    keys = rows.k[index].double().repeat_interleave(PER_KEY, 0)
    state = rows.decay[index].double().exp()[:, None, None] * state
    u = rows.v[index].double()
    if rows.beta is not None:
        u = rows.beta[index].double()[:, None] * (u - torch.einsum("hkv,hk->hv", state, keys))
    state = state + keys.unsqueeze(2) * u.unsqueeze(1)
    queries = rows.q[index].double().repeat_interleave(PER_KEY, 0)
    return state, torch.einsum("hkv,hk->hv", state, queries)


def walk(rows: StateRows, parents: list[int], state: Tensor) -> tuple[list[Tensor], Tensor]:
    """(the state behind each row, [rows, heads, value_dim] what it reads)."""
    states: list[Tensor] = []
    outs = []
    for index, parent in enumerate(parents):
        behind, out = one_row(rows, index, states[parent] if parent >= 0 else state)
        states.append(behind)
        outs.append(out)
    return states, torch.stack(outs)


def masked(parents: list[int]) -> Tensor:
    """[rows, rows] bool: itself and its ancestors."""
    sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] = sees[parent]
        sees[row, row] = True
    return sees


def random_tree(num: int) -> list[int]:
    return [-1, *(random.randrange(-1, row) for row in range(1, num))]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "sums"])
def test_trees_read_and_commit_as_a_walk_along_each_branch(delta: bool) -> None:
    random.seed(0)
    torch.manual_seed(0)
    for size in (1, 2, 7, 12):
        trees = [random_tree(size) for _ in range(5)] + [list(range(-1, size - 1))]
        rows = random_rows(len(trees) * size, delta=delta)
        before = torch.randn(len(trees), HEADS, KEY_DIM, VALUE_DIM)
        sees = torch.stack([masked(tree) for tree in trees])
        found = extend_states_reference(rows, before, sees, None)
        ends = [random.randrange(size) for _ in trees]
        paths, kept = torch.zeros(len(trees), size, dtype=torch.int64), []
        wanted = []
        for index, (tree, end) in enumerate(zip(trees, ends, strict=True)):
            mine = StateRows(
                *(None if each is None else each[index * size :][:size] for each in rows)
            )
            states, outs = walk(mine, tree, before[index].double())
            assert off(found.out[index * size :][:size], outs) < 1e-5
            path = [end]
            while tree[path[-1]] >= 0:
                path.append(tree[path[-1]])
            paths[index] = torch.arange(size)
            paths[index, : len(path)] = torch.tensor(path[::-1])
            kept.append(len(path))
            wanted.append(states[end])
        assert found.u is not None
        assert found.decay is not None
        shape = (len(trees), size)
        behind = commit_states_reference(
            before,
            rows.k.view(*shape, KEY_HEADS, KEY_DIM),
            found.u.view(*shape, HEADS, VALUE_DIM),
            found.decay.view(*shape, HEADS),
            paths,
            torch.tensor(kept, dtype=torch.int32),
        )
        assert off(behind, torch.stack(wanted)) < 1e-5


def test_a_request_of_which_nothing_lasts_keeps_its_state() -> None:
    before = torch.randn(2, HEADS, KEY_DIM, VALUE_DIM)
    behind = commit_states_reference(
        before,
        torch.randn(2, 3, KEY_HEADS, KEY_DIM),
        torch.randn(2, 3, HEADS, VALUE_DIM),
        -torch.rand(2, 3, HEADS),
        torch.arange(3).expand(2, 3),
        torch.tensor([0, 2], dtype=torch.int32),
    )
    assert torch.equal(behind[0], before[0])
    assert not torch.equal(behind[1], before[1])


def cut(lens: list[int], size: int, spare: int) -> Chunks:
    """Chunks of requests of so many rows, and some of nobody."""
    reqs, rows, live, places, begin = [], [], [], [], 0
    for req, num in enumerate(lens):
        for first in range(0, num, size):
            reqs.append(req)
            at = [begin + first + each for each in range(size)]
            rows.append([min(each, sum(lens) - 1) for each in at])
            live.append([first + each < num for each in range(size)])
            count = min(size, num - first)
            places += [len(reqs) * size - size + each for each in range(count)]
        begin += num
    reqs += [len(lens)] * spare
    rows += [[0] * size] * spare
    live += [[False] * size] * spare
    return Chunks(
        reqs=torch.tensor(reqs),
        rows=torch.tensor(rows),
        live=torch.tensor(live),
        places=torch.tensor(places),
    )


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "sums"])
def test_chunks_of_a_ragged_step_follow_on_one_another(delta: bool) -> None:
    torch.manual_seed(1)
    lens = [1, 16, 0, 50, 17]
    rows = random_rows(sum(lens), delta=delta)
    before = torch.randn(len(lens), HEADS, KEY_DIM, VALUE_DIM)
    causal = torch.ones(1, 16, 16, dtype=torch.bool).tril()
    found = extend_states_reference(rows, before, causal, cut(lens, 16, 2))
    begin = 0
    for index, num in enumerate(lens):
        mine = StateRows(*(None if each is None else each[begin:][:num] for each in rows))
        begin += num
        if not num:
            assert torch.equal(found.states[index], before[index])
            continue
        states, outs = walk(mine, list(range(-1, num - 1)), before[index].double())
        assert off(found.out[begin - num : begin], outs) < 1e-5
        assert off(found.states[index], states[-1]) < 1e-5


def test_strong_decay_and_repeated_keys_stay_finite() -> None:
    rows = random_rows(64, delta=True)
    rows = rows._replace(
        k=rows.k[:1].expand(64, -1, -1),
        decay=torch.where(torch.arange(64)[:, None] % 2 == 0, -200.0, -1e-6).expand(64, HEADS),
        beta=torch.full((64, HEADS), 0.999),
    )
    before = torch.randn(1, HEADS, KEY_DIM, VALUE_DIM)
    causal = torch.ones(1, 64, 64, dtype=torch.bool).tril()
    found = extend_states_reference(rows, before, causal, None)
    states, outs = walk(rows, list(range(-1, 63)), before[0].double())
    assert off(found.out, outs) < 1e-4
    assert off(found.states[0], states[-1]) < 1e-4


def test_published_numbers_of_the_delta_rule() -> None:
    rows = StateRows(
        q=(unit(golden(1, 6, 4)) * 0.5).view(6, 1, 4),
        k=unit(golden(2, 6, 4)).view(6, 1, 4),
        v=golden(3, 6, 3).view(6, 1, 3),
        decay=-golden(4, 6, 1).abs(),
        beta=golden(5, 6, 1).sigmoid(),
    )
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    found = extend_states_reference(rows, torch.zeros(1, 1, 4, 3), causal, None)
    wanted = torch.tensor([0.11841730, -0.16071630, -0.20440014])
    torch.testing.assert_close(found.out[5, 0], wanted, rtol=0, atol=1e-6)
    assert float(found.states.sum()) == pytest.approx(0.17912705, abs=1e-6)


def test_published_numbers_of_mamba_2() -> None:
    x, dt = golden(1, 6, 3), torch.nn.functional.softplus(golden(4, 6))
    rows = StateRows(
        q=golden(3, 6, 1, 4),
        k=golden(2, 6, 1, 4),
        v=(x * dt[:, None]).view(6, 1, 3),
        decay=-0.7 * dt.view(6, 1),
        beta=None,
    )
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    found = extend_states_reference(rows, torch.zeros(1, 1, 4, 3), causal, None)
    wanted = torch.tensor([0.62220944, -0.39490146, -0.83348080])
    torch.testing.assert_close(found.out[5, 0] + 0.5 * x[5].float(), wanted, rtol=0, atol=1e-6)
    assert float(found.states.sum()) == pytest.approx(0.35796601, abs=1e-6)


def test_published_numbers_of_a_convolution() -> None:
    rows, weight = golden(1, 6, 2), golden(2, 2, 4)
    offsets = torch.arange(6).unsqueeze(1) - torch.arange(3, 0, -1)
    places = places_of(offsets, offsets, torch.zeros(6, 1, dtype=torch.int64), num_rows=6, window=3)
    found = conv_rows_reference(rows, torch.zeros(1, 2, 3), places, weight, None)
    wanted = torch.tensor([[-0.19788698, -0.24800723], [-0.01404505, -0.23702785]])
    torch.testing.assert_close(found[[0, 5]].float(), wanted, rtol=0, atol=1e-6)


def test_the_worked_example_of_conv_rows() -> None:
    rows = torch.arange(10.0).view(5, 2)
    windows = torch.tensor([[[10.0, 12.0], [11.0, 13.0]], [[14.0, 16.0], [15.0, 17.0]]])
    places = torch.tensor([[5, 6], [6, 0], [0, 1], [7, 8], [7, 8]])
    weight = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]])
    found = conv_rows_reference(rows, windows, places, weight, torch.tensor([0.5, 0.25]))
    totals = [
        [130.5, 482.25],
        [212.5, 646.25],
        [420.5, 1062.25],
        [774.5, 1770.25],
        [974.5, 2170.25],
    ]
    wanted = torch.nn.functional.silu(torch.tensor(totals))
    torch.testing.assert_close(found, wanted)
    behind = next_windows_reference(rows, windows, torch.tensor([[1, 2], [8, 3]]))
    assert behind.tolist() == [[[2.0, 4.0], [3.0, 5.0]], [[16.0, 6.0], [17.0, 7.0]]]
