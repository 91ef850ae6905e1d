"""commit against a walk in plain Python: every ending, small tree, and rows that want nothing."""

from itertools import chain

import pytest
import torch
from commit_cases import (
    Request,
    assert_same,
    assert_walks,
    chain_of,
    ended_chains,
    make_round,
    random_requests,
    small_trees,
    walk,
)
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.step import FinishCode
from paceline.kernels._triton.commit import launch_commit
from paceline.kernels.commit import _COMMIT, _commit_cuda, commit, commit_reference
from paceline.runner.recording.recorded import RecordedGraph

LETTERS = {letter: index for index, letter in enumerate("abcdxyz")}


def letters(text: str) -> list[int]:
    return [LETTERS[letter] for letter in text]


def test_the_worked_example_emits_as_stated() -> None:
    request = Request(letters("abcd"), letters("cxyz"), (-1, 0, 0, 1))
    made = make_round([request], 3, chains=False)
    commit(*made)
    assert made.accepted.path.tolist() == [[0, 2, 2]]
    assert made.results.tolist() == [[2, 0, *letters("cy"), 0]]
    assert made.accepted.last.tolist() == [1]
    row = int(made.sampled.row_ids[0])
    assert made.rows.kv_committed[row] == 9
    assert made.rows.token_ids[row, 8:10].tolist() == letters("cy")


def test_a_chain_ends_at_every_token_in_every_way() -> None:
    requests = list(ended_chains(5))
    codes = {walk(request, 5).code for request in requests}
    assert codes == set(FinishCode)
    assert_walks(commit, requests, 5, chains=True)


def test_a_chain_is_the_tree_of_one_branch() -> None:
    assert_walks(commit, list(ended_chains(4)), 4, chains=False)


@pytest.mark.parametrize(("n", "max_path"), [(2, 2), (3, 3), (4, 4), (4, 2), (5, 4)])
def test_every_small_tree_is_walked_to_the_first_child_that_was_sampled(
    n: int, max_path: int
) -> None:
    assert_walks(commit, list(small_trees(n)), max_path)


@pytest.mark.parametrize(("n", "max_path"), [(6, 6), (6, 3), (11, 5), (17, 6)])
@pytest.mark.parametrize("chains", [False, True])
def test_endings_limits_and_padded_rows_meet_in_a_batch(
    n: int, max_path: int, chains: bool
) -> None:
    requests = random_requests(600, n, chains=chains, seed=n)
    assert {walk(request, max_path).code for request in requests} == set(FinishCode)
    assert_walks(commit, requests, max_path, chains=chains)


@pytest.mark.parametrize("n", range(3))
def test_a_request_accepts_no_more_drafts_than_it_may(n: int) -> None:
    request = Request([5] * 4, [5] * 4, chain_of(4), max_drafts=n)
    made = make_round([request], 4, chains=True)
    commit(*made)
    assert made.results[0, 0] == n + 1


def test_a_round_of_padded_rows_keeps_the_padding_facts() -> None:
    request = Request([1] * 3, [1] * 3, chain_of(3), failed=frozenset({0}), is_padded=True)
    made = make_round([request] * 2, 3, chains=True)
    before = [column.clone() for column in made.rows]
    commit(*made)
    assert all(map(torch.equal, made.rows, before))
    assert made.accepted.path.tolist() == [[0, 1, 2]] * 2
    assert made.accepted.last.tolist() == [0, 3]
    assert not made.results.any()


@pytest.mark.parametrize("chains", [False, True])
def test_the_kernel_emits_what_the_plain_walk_does(chains: bool) -> None:
    requests = random_requests(24, 6, chains=chains, seed=3)
    assert_walks(launch_commit, requests, 6 if chains else 4, chains=chains)


def test_the_kernel_walks_a_tree_of_any_width() -> None:
    """17 rows: behind the last one its registers hold nothing."""
    assert_walks(launch_commit, random_requests(9, 17, chains=False, seed=4), 5)


def test_the_kernel_takes_no_other_rows_limit_for_a_stop_id() -> None:
    """Behind the stop ids of a row lies the next row's limit."""
    request = Request([50, 7, 7], [48, 9, 9], chain_of(3))  # 48: known tokens at the limit
    assert_walks(launch_commit, [request] * 4, 3, chains=True)


# The operator, graphs and arguments


@pytest.mark.parametrize("chains", [False, True])
def test_the_operator_hands_every_argument_to_the_kernel(chains: bool) -> None:
    requests = random_requests(6, 5, chains=chains, seed=2)
    found, wanted = (make_round(requests, 4, chains=chains) for _ in range(2))
    commit_reference(*wanted)
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("commit", _commit_cuda, "CPU")
        tensors = found.rows, found.ends, found.sampled, [found.results]
        _COMMIT(*chain.from_iterable(tensors), *found.drafts, *found.accepted)
    assert_same(found.written(), wanted.written())


@pytest.mark.parametrize("chains", [False, True])
def test_a_replay_walks_the_drafts_it_finds(chains: bool) -> None:
    made, others = (
        make_round(random_requests(20, 6, chains=chains, seed=seed), 4, chains=chains)
        for seed in (8, 9)
    )
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: commit(*made))
    for mine, theirs in zip(made, others, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if one is not None and other is not None:
                one.copy_(other)
    graph.replay()
    commit(*others)
    assert_same(made.written(), others.written())


@pytest.mark.parametrize("launch", [commit_reference, launch_commit])
def test_one_row_without_a_walk_is_the_walk_over_one_row(launch) -> None:
    """A plain step's path by its shape; requests that want no token are among them."""
    requests = random_requests(300, 1, chains=True, seed=11)
    assert {walk(request, 1).code for request in requests} == set(FinishCode)
    assert any(not request.wants_token and 0 in request.failed for request in requests)
    walked, alone = (make_round(requests, 1, chains=True) for _ in range(2))
    commit_reference(*walked)
    launch(*alone[:4])
    wanted = walked.written() | alone.accepted._asdict()  # which nobody asked for
    assert_same(alone.written(), wanted)


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    made = make_round(random_requests(4, 5, chains=False, seed=0), 3, chains=False)

    def refused(text: str, **fields: Tensor) -> None:
        parts = {
            name: part._replace(**{key: fields[key] for key in fields.keys() & part._asdict()})
            for name, part in made._asdict().items()
            if name != "results"
        }
        changed = made._replace(**parts, results=fields.get("results", made.results))
        with pytest.raises(KernelArgumentError, match=text):
            commit(*changed)

    parents, sampled = made.drafts.parents, made.sampled
    assert parents is not None
    refused(
        r"parents must be contiguous torch.int32 \[4, 5\], got int64 \[4, 5\]",
        parents=parents.long(),
    )
    refused(r"token_ids must be .*, got int64 \[4, 4\]", token_ids=sampled.token_ids[:, 1:])
    refused(r"finite must be .* torch.bool \[4, 5\]", finite=sampled.finite.int())
    refused(r"last must be contiguous torch.int64 \[4\]", last=made.accepted.last[1:])
    refused(r"results must be .*\[4, 5\], got .*; pass", results=made.accepted.path.int())
    with pytest.raises(
        KernelArgumentError, match=r"token_ids must be .*\[4, 1\], got int64 \[4, 5\]"
    ):
        commit(*made[:4])
