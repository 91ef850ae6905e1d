"""accept_and_commit against a walk in plain Python: every ending, small tree and forced length."""

import itertools
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from accept_cases import (
    Request,
    Verdict,
    assert_same,
    assert_walks,
    chain_of,
    ended_chains,
    make_round,
    random_requests,
    small_trees,
    walk,
    wanted_after,
)

from paceline.core.errors import KernelArgumentError
from paceline.core.step import FinishCode
from paceline.kernels._triton.accept import launch_accept
from paceline.kernels.accept import (
    _ACCEPT,
    Accepted,
    Drafts,
    _accept_cuda,
    accept_and_commit,
    accept_reference,
)
from paceline.runner.recorded import RecordedGraph

LETTERS = {letter: index for index, letter in enumerate("abcdxyz")}
KERNEL = partial(launch_accept, forced=None)


def letters(text: str) -> list[int]:
    return [LETTERS[letter] for letter in text]


def test_the_worked_example_emits_as_stated() -> None:
    request = Request(letters("abcd"), letters("cxyz"), (-1, 0, 0, 1))
    made = make_round([request], 3, chains=False)
    accept_and_commit(*made)
    assert made.out.path.tolist() == [[0, 2, 2]]
    assert made.out.results.tolist() == [[2, 0, *letters("cy"), 0]]
    assert made.out.last.tolist() == [1]
    row = int(made.drafts.row_ids[0])
    assert made.rows.kv_committed[row] == 9
    assert made.rows.token_ids[row, 8:10].tolist() == letters("cy")


def test_a_chain_ends_at_every_token_in_every_way() -> None:
    requests = list(ended_chains(5))
    codes = {walk(request, 5).code for request in requests}
    assert codes == set(FinishCode)
    assert_walks(accept_and_commit, requests, 5, chains=True)


def test_a_chain_is_the_tree_of_one_branch() -> None:
    assert_walks(accept_and_commit, list(ended_chains(4)), 4, chains=False)


@pytest.mark.parametrize(("n", "max_path"), [(2, 2), (3, 3), (4, 4), (4, 2), (5, 4)])
def test_every_small_tree_is_walked_to_the_first_child_that_was_sampled(
    n: int, max_path: int
) -> None:
    assert_walks(accept_and_commit, list(small_trees(n)), max_path)


@pytest.mark.parametrize(("n", "max_path"), [(6, 6), (6, 3), (11, 5), (17, 6)])
@pytest.mark.parametrize("chains", [False, True])
def test_endings_limits_and_padded_rows_meet_in_a_batch(
    n: int, max_path: int, chains: bool
) -> None:
    requests = random_requests(600, n, chains=chains, seed=n)
    assert {walk(request, max_path).code for request in requests} == set(FinishCode)
    assert_walks(accept_and_commit, requests, max_path, chains=chains)


@pytest.mark.parametrize("n", range(3))
def test_a_request_accepts_no_more_drafts_than_it_may(n: int) -> None:
    request = Request([5] * 4, [5] * 4, chain_of(4), max_drafts=n)
    made = make_round([request], 4, chains=True)
    accept_and_commit(*made)
    assert made.out.results[0, 0] == n + 1


def test_a_round_of_padded_rows_keeps_the_padding_facts() -> None:
    request = Request([1] * 3, [1] * 3, chain_of(3), failed=frozenset({0}), is_padded=True)
    made = make_round([request] * 2, 3, chains=True)
    before = [column.clone() for column in made.rows]
    accept_and_commit(*made)
    assert all(map(torch.equal, made.rows, before))
    assert made.out.path.tolist() == [[0, 1, 2]] * 2
    assert made.out.last.tolist() == [0, 3]
    assert not made.out.results.any()


@pytest.mark.parametrize("chains", [False, True])
def test_the_kernel_emits_what_the_plain_walk_does(chains: bool) -> None:
    requests = random_requests(24, 6, chains=chains, seed=3)
    assert_walks(KERNEL, requests, 6 if chains else 4, chains=chains)


def test_the_kernel_walks_a_tree_of_any_width() -> None:
    """17 rows: behind the last one its registers hold nothing."""
    assert_walks(KERNEL, random_requests(9, 17, chains=False, seed=4), 5)


def test_the_kernel_takes_no_other_rows_limit_for_a_stop_id() -> None:
    """Behind the stop ids of a row lies the next row's limit."""
    request = Request([50, 7, 7], [48, 9, 9], chain_of(3))  # 48: known tokens at the limit
    assert_walks(KERNEL, [request] * 4, 3, chains=True)


# Forced rounds


def paths_of(parents: Sequence[int], max_path: int) -> list[list[int]]:
    """Every way down from the root, in the order of its last row."""
    ways = {0: [0]}
    for row in range(1, len(parents)):
        if parents[row] in ways:
            ways[row] = [*ways[parents[row]], row]
    return [way for _, way in sorted(ways.items()) if len(way) <= max_path]


def forced_walk(request: Request, max_path: int, drafts: int) -> Verdict:
    """As `walk`, down to the first row that is so deep, or deepest."""
    paths = paths_of(request.parents, max_path)
    depth = min(drafts, request.max_drafts, max(map(len, paths)) - 1)
    path = next(path for path in paths if len(path) == depth + 1)
    # The plain walk takes this way, where it alone was drafted and sampled.
    said = list(request.sampled)
    for above, below in itertools.pairwise(path):
        said[above] = request.tokens[below]
    parents = [parent if row in path else -1 for row, parent in enumerate(request.parents)]
    return walk(request._replace(sampled=said, parents=parents), max_path)


def emitted_alone(requests: Sequence[Request], forced: float) -> list[int]:
    """Tokens each of them would emit from where it stands, if nothing ended it."""
    n = 12
    endless = [Request([0] * n, [0] * n, chain_of(n), prefix=r.prefix) for r in requests]
    made = make_round(endless, n, chains=True)
    accept_and_commit(*made, forced=forced)
    return [int(num) for num in made.out.results[:, 0]]


@pytest.mark.parametrize("forced", [1.0, 1.37, 2.5, 3.0, 6.2])
@pytest.mark.parametrize("chains", [False, True])
def test_a_forced_round_goes_to_the_first_row_that_is_deep_enough(
    forced: float, chains: bool
) -> None:
    requests = random_requests(200, 7, chains=chains, seed=7)
    made = make_round(requests, 5, chains=chains)
    verdicts = [
        forced_walk(request, 5, num - 1)
        for request, num in zip(requests, emitted_alone(requests, forced), strict=True)
    ]
    wanted = wanted_after(made, verdicts)
    accept_and_commit(*made, forced=forced)
    assert_same((made.rows, made.out), wanted)


@pytest.mark.parametrize("forced", [1.0, 1.5, 2.0, 2.71828, 3.3, 4.99, 6.0])
def test_forced_rounds_emit_as_many_tokens_on_average_as_was_asked(forced: float) -> None:
    """Rounds in a row, of requests that begin anywhere: no sum of them strays."""
    reqs, rounds = 40, 400
    requests = [
        Request([3] * 7, [4] * 7, chain_of(7), prefix=prefix % 25) for prefix in range(reqs)
    ]
    made = make_round(requests, 7, chains=True)
    wide = made.rows._replace(token_ids=torch.zeros(made.rows.token_ids.shape[0], 3000).int())
    ends = made.ends._replace(max_len=torch.full_like(made.ends.max_len, 10**6))
    prefix = made.drafts.prefix_lens.clone()
    first, seen = prefix.clone(), set()
    for count in range(1, rounds + 1):
        drafts = made.drafts._replace(prefix_lens=prefix)
        accept_and_commit(wide, ends, drafts, made.out, forced=forced)
        emitted = made.out.results[:, 0]
        seen |= set(emitted.tolist())
        prefix = prefix + emitted
        assert ((prefix - first - count * forced).abs() <= 2.01).all()
    assert seen <= {math.floor(forced), math.ceil(forced)}


@pytest.mark.parametrize("chains", [False, True])
def test_the_kernel_forces_what_the_reference_does(chains: bool) -> None:
    for forced in (1.0, 2.5, 5.3):
        requests = random_requests(10, 6, chains=chains, seed=int(forced))
        found, wanted = (make_round(requests, 3, chains=chains) for _ in range(2))
        launch_accept(*found, forced=forced)
        accept_reference(*wanted, forced=forced)
        assert_same((found.rows, found.out), (wanted.rows, wanted.out))


# The operator, graphs and arguments


@pytest.mark.parametrize("chains", [False, True])
def test_the_operator_hands_every_argument_to_the_kernel(chains: bool) -> None:
    requests = random_requests(6, 5, chains=chains, seed=2)
    found, wanted = (make_round(requests, 4, chains=chains) for _ in range(2))
    accept_reference(*wanted, forced=1.5)
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("accept", _accept_cuda, "CPU")
        _ACCEPT(*found.rows, *found.ends, *found.drafts, *found.out, 1.5)
    assert_same((found.rows, found.out), (wanted.rows, wanted.out))


@pytest.mark.parametrize("forced", [None, 1.75])
@pytest.mark.parametrize("chains", [False, True])
def test_a_replay_walks_the_drafts_it_finds(chains: bool, forced: float | None) -> None:
    made, others = (
        make_round(random_requests(20, 6, chains=chains, seed=seed), 4, chains=chains)
        for seed in (8, 9)
    )
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: accept_and_commit(*made, forced=forced))
    for mine, theirs in zip(made, others, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if one is not None and other is not None:
                one.copy_(other)
    graph.replay()
    accept_and_commit(*others, forced=forced)
    assert_same((made.rows, made.out), (others.rows, others.out))


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    rows, ends, drafts, out = make_round(
        random_requests(4, 5, chains=False, seed=0), 3, chains=False
    )

    def refused(text: str, drafts: Drafts = drafts, out: Accepted = out) -> None:
        with pytest.raises(KernelArgumentError, match=text):
            accept_and_commit(rows, ends, drafts, out)

    assert drafts.parents is not None
    refused(
        r"parents must be contiguous torch.int32 \[4, 5\], got int64 \[4, 5\]",
        drafts=drafts._replace(parents=drafts.parents.long()),
    )
    refused(
        r"sampled must be .*, got int64 \[4, 4\]", drafts._replace(sampled=drafts.sampled[:, 1:])
    )
    refused(r"finite must be .* torch.bool \[4, 5\]", drafts._replace(finite=drafts.finite.int()))
    refused(r"last must be contiguous torch.int64 \[4\]", out=out._replace(last=out.last[1:]))
    refused(r"results must be .*\[4, 5\], got .*; every", out=out._replace(results=out.path.int()))
