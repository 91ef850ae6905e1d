"""force_drafts: which way a round goes that emits as many tokens as was asked for."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from commit_cases import (
    Request,
    Round,
    Verdict,
    assert_same,
    chain_of,
    make_round,
    random_requests,
    walk,
    wanted_after,
)

from paceline.core.modes import MaskKind
from paceline.kernels.commit import commit
from paceline.kernels.step_view import StepView
from paceline.runner.draft_paths import _forced_depths, force_drafts
from paceline.runner.recording.recorded import RecordedGraph


def ancestors(parents: Sequence[int]) -> list[list[bool]]:
    """Of every row which rows it sees: itself and those above it."""
    seen: list[list[bool]] = []
    for row, parent in enumerate(parents):
        above = seen[parent] if parent >= 0 else [False] * len(parents)
        seen.append([see or other == row for other, see in enumerate(above)])
    return seen


def view_of(made: Round, requests: Sequence[Request]) -> StepView:
    """What of a view `force_drafts` reads."""
    reqs, n = made.drafts.tokens.shape
    nothing = torch.empty(0)
    mask = None
    if made.drafts.parents is not None:
        mask = torch.tensor([ancestors(request.parents) for request in requests])
    return StepView(
        row_ids=made.sampled.row_ids,
        prefix_lens=made.sampled.kv_lens - n,
        extend_lens=nothing,
        kv_lens=made.sampled.kv_lens,
        cu_seqlens_q=torch.empty(reqs + 1),
        req_ids=nothing,
        positions=nothing,
        rope_positions=nothing,
        input_ids=made.drafts.tokens.view(-1),
        logits_loc=nothing,
        groups=(),
        mask=MaskKind.CAUSAL if mask is None else MaskKind.TREE,
        tree_mask=None if mask is None else mask.view(reqs * n, n),
        max_extend_len=n,
        kv_len_bound=99,
    )


def commit_forced(made: Round, view: StepView, length: float) -> None:
    drafts, token_ids = force_drafts(
        made.drafts,
        made.sampled.token_ids.flatten(),
        view,
        length=length,
        max_path=made.accepted.path.shape[1],
    )
    commit(*made._replace(sampled=made.sampled._replace(token_ids=token_ids), drafts=drafts))


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


def emitted_alone(requests: Sequence[Request], length: float) -> list[int]:
    """Tokens each of them would emit from where it stands, if nothing ended it."""
    n = 12
    endless = [Request([0] * n, [0] * n, chain_of(n), prefix=r.prefix) for r in requests]
    made = make_round(endless, n, chains=True)
    commit_forced(made, view_of(made, endless), length)
    return [int(num) for num in made.results[:, 0]]


def with_own_tokens(requests: Sequence[Request]) -> list[Request]:
    """The same where siblings differ in token, as those of a proposer do."""
    return [
        request._replace(tokens=[request.tokens[0], *range(100, 99 + len(request.tokens))])
        for request in requests
    ]


@pytest.mark.parametrize("length", [1.0, 1.37, 2.5, 3.0, 6.2])
@pytest.mark.parametrize("chains", [False, True])
def test_a_forced_round_goes_to_the_first_row_that_is_deep_enough(
    length: float, chains: bool
) -> None:
    requests = with_own_tokens(random_requests(200, 7, chains=chains, seed=7))
    made = make_round(requests, 5, chains=chains)
    verdicts = [
        forced_walk(request, 5, num - 1)
        for request, num in zip(requests, emitted_alone(requests, length), strict=True)
    ]
    wanted = wanted_after(made, verdicts)
    commit_forced(made, view_of(made, requests), length)
    assert_same(made.written(), wanted)


@pytest.mark.parametrize("length", [1.0, 1.5, 2.0, 2.71828, 3.3, 4.99, 6.0])
def test_forced_rounds_emit_as_many_tokens_on_average_as_was_asked(length: float) -> None:
    """Rounds in a row, of requests that begin anywhere: no sum of them strays."""
    reqs, rounds = 40, 400
    requests = [
        Request([3] * 7, [4] * 7, chain_of(7), prefix=prefix % 25) for prefix in range(reqs)
    ]
    made = make_round(requests, 7, chains=True)
    wide = made.rows._replace(token_ids=torch.zeros(made.rows.token_ids.shape[0], 3000).int())
    made.ends.max_len.fill_(10**6)
    made = made._replace(rows=wide)
    first, seen = made.sampled.kv_lens.clone(), set()
    for count in range(1, rounds + 1):
        commit_forced(made, view_of(made, requests), length)
        emitted = made.results[:, 0]
        seen |= set(emitted.tolist())
        made.sampled.kv_lens.add_(emitted)
        assert ((made.sampled.kv_lens - first - count * length).abs() <= 2.01).all()
    assert seen <= {math.floor(length), math.ceil(length)}


@pytest.mark.parametrize("chains", [False, True])
def test_a_replay_forces_the_drafts_it_finds(chains: bool) -> None:
    length, views, rounds = 1.75, [], []
    for seed in (8, 9):
        requests = with_own_tokens(random_requests(20, 6, chains=chains, seed=seed))
        rounds.append(make_round(requests, 4, chains=chains))
        views.append(view_of(rounds[-1], requests))
    (made, others), (view, other_view) = rounds, views
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: commit_forced(made, view, length))
    for mine, theirs in zip(
        (*made.sampled, *made.drafts), (*others.sampled, *others.drafts), strict=True
    ):
        if mine is not None and theirs is not None:
            mine.copy_(theirs)
    for mine, theirs in zip((*made.rows, *made.ends), (*others.rows, *others.ends), strict=True):
        mine.copy_(theirs)
    view.prefix_lens.copy_(other_view.prefix_lens)
    if view.tree_mask is not None:
        view.tree_mask.copy_(other_view.tree_mask)
    graph.replay()
    commit_forced(others, other_view, length)
    assert_same(made.written(), others.written())


@pytest.mark.parametrize("length", [1.5, 2.71828, 3.3])
def test_a_round_ends_where_the_requests_own_row_of_ends_says(length: float) -> None:
    """Round k of row r ends at floor(k * length + phase of r); rows are spread over a length."""
    requests = [Request([3] * 7, [4] * 7, chain_of(7), prefix=n % 25) for n in range(60)]
    made = make_round(requests, 7, chains=True)
    commit_forced(made, view_of(made, requests), length)
    whole = round(length * 2**16)
    wanted = []
    for row, request in zip(made.sampled.row_ids.tolist(), requests, strict=True):
        phase = row * 40503 % 2**16
        ends = [(k * whole + phase) // 2**16 for k in range(-9, 60)]
        before = max(end for end in ends if end <= request.prefix)
        wanted.append(ends[ends.index(before) + 1] - before)
    assert made.results[:, 0].tolist() == wanted
    assert len(set(wanted)) > 1


LAST_PHASE = -pow(40503, -1, 2**16) % 2**16  # a row that is all but one 2**-16 ahead


@pytest.mark.parametrize(
    ("row", "prefix", "length"),
    [
        (0, 2, 1.5),  # ends at 1, 3: the round before has not reached 3
        (LAST_PHASE, 0, 1.5),  # ends at 0.99998 and 2.49998: it has reached 0
        (LAST_PHASE, 0, 1 + 2**-16),  # ends at 0.99998 and 2 sharp
    ],
)
def test_an_end_that_is_met_sharp_is_an_end(row: int, prefix: int, length: float) -> None:
    request = Request([3] * 7, [4] * 7, chain_of(7))
    view = view_of(make_round([request], 7, chains=True), [request])
    view.row_ids.fill_(row)
    view.prefix_lens.fill_(prefix)
    assert _forced_depths(view, length).tolist() == [1]
