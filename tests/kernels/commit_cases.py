"""Rounds for commit, and what they must emit, walked in plain Python.

Everything that may be written starts as rubbish, so that what is forgotten shows.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels.commit import Accepted, CommittedRows, Drafts, EndRules, SampledTokens

RUBBISH = -77
WIDTH = 60  # tokens of a row's history
MAX_STOP_IDS = 3
SPARE_ROWS = 3  # of the table: in no round

Commit = Callable[[CommittedRows, EndRules, SampledTokens, Tensor, Drafts, Accepted], None]


class Request(NamedTuple):
    """One request of a round."""

    tokens: Sequence[int]  # [n]
    sampled: Sequence[int]  # [n]
    parents: Sequence[int]  # [n]
    failed: frozenset[int] = frozenset()  # rows whose logits are not finite
    stop_ids: tuple[int, ...] = ()
    prefix: int = 7
    room: int = 40  # tokens until the limit
    max_drafts: int = 99
    is_padded: bool = False
    wants_token: bool = True


class Verdict(NamedTuple):
    """What becomes of it."""

    path: list[int]
    emitted: list[int]
    code: FinishCode


class Round(NamedTuple):
    """What a round reads and writes."""

    rows: CommittedRows
    ends: EndRules
    sampled: SampledTokens
    results: Tensor
    drafts: Drafts
    accepted: Accepted

    def written(self) -> dict[str, Tensor]:
        """What commit may write, by name."""
        outputs = self.rows._asdict() | self.accepted._asdict()
        return {**outputs, "results": self.results}


def walk(request: Request, max_path: int) -> Verdict:
    """From child to child, one token at a time."""
    node = 0
    path: list[int] = []
    emitted: list[int] = []
    while request.wants_token and not request.is_padded:
        if node in request.failed:
            return Verdict(path, emitted, FinishCode.NON_FINITE)
        token = request.sampled[node]
        path.append(node)
        emitted.append(token)
        if token in request.stop_ids:
            return Verdict(path, emitted, FinishCode.STOP_TOKEN)
        if len(emitted) >= request.room:
            return Verdict(path, emitted, FinishCode.LENGTH)
        children = [
            child
            for child, (parent, draft) in enumerate(
                zip(request.parents, request.tokens, strict=True)
            )
            if parent == node and draft == token
        ]
        if not children or len(emitted) > request.max_drafts or len(emitted) == max_path:
            break
        node = children[0]
    return Verdict(path, emitted, FinishCode.RUNNING)


def chain_of(n: int) -> tuple[int, ...]:
    return tuple(range(-1, n - 1))


def ended_chains(n: int) -> Iterator[Request]:
    """Every number of right drafts, stop position, failed row and distance to the limit."""
    nowhere = n + 1
    for right, stop, failed, room in itertools.product(
        range(n), (*range(n), nowhere), (*range(n), nowhere), range(1, n + 2)
    ):
        sampled = [100 + i for i in range(n)]
        tokens = [50, *(sampled[i] if i < right else 7 for i in range(n - 1))]
        stops = (8, 100 + stop) if stop < n else (8,)
        yield Request(
            tokens, sampled, chain_of(n), frozenset({failed} - {nowhere}), stops, room=room
        )


def small_trees(n: int) -> Iterator[Request]:
    """Every tree of n rows, those that hang nowhere too, with two tokens at every place."""
    for parents in itertools.product(*(range(-1, child) for child in range(1, n))):
        for tokens in itertools.product((3, 4), repeat=n - 1):
            for sampled in itertools.product((3, 4), repeat=n):
                yield Request((3, *tokens), sampled, (-1, *parents))


def random_requests(num: int, n: int, *, chains: bool, seed: int) -> list[Request]:
    """All that may end a walk, at once; few tokens, so that many drafts are right."""
    source = random.Random(seed)
    return [
        Request(
            tokens=[source.randrange(3) for _ in range(n)],
            sampled=[source.choice((0, 1, 2, 2**31 - 1)) for _ in range(n)],
            parents=chain_of(n)
            if chains
            else (-1, *(source.randrange(0 if row % 5 else -1, row) for row in range(1, n))),
            failed=frozenset(row for row in range(n) if source.random() < 0.06),
            stop_ids=tuple(source.sample((0, 1, 2, 9), k=source.choice((0, 0, 0, 1)))),
            prefix=source.randrange(30),
            room=source.randrange(1, n + 4),
            max_drafts=source.choice((0, 1, 2, n, n)),
            is_padded=source.random() < 0.15,
            wants_token=source.random() < 0.9,
        )
        for _ in range(num)
    ]


def make_round(requests: Sequence[Request], max_path: int, *, chains: bool) -> Round:
    """A round over a table with strided columns; requests stand in it in any order."""
    reqs, table_rows = len(requests), len(requests) + 1 + SPARE_ROWS
    order = random.Random(reqs).sample(range(1, table_rows), reqs)
    row_ids = [PAD_ROW if r.is_padded else row for r, row in zip(requests, order, strict=True)]
    state = torch.full((table_rows, 2), RUBBISH, dtype=torch.int32)
    state[PAD_ROW] = torch.tensor([PAD_PREFIX_LEN, FinishCode.RUNNING])
    rules = torch.full((table_rows, 2 + MAX_STOP_IDS), -1)
    rules[:, :2] = 0
    rules_np = rules.numpy()  # the same memory; torch is slow entry by entry
    history = torch.full((table_rows, WIDTH), RUBBISH, dtype=torch.int32)
    history[PAD_ROW] = 0
    for row, request in zip(row_ids, requests, strict=True):
        if not request.is_padded:
            stops = (*request.stop_ids, *[-1] * (MAX_STOP_IDS - len(request.stop_ids)))
            rules_np[row] = (request.prefix + 1 + request.room, request.max_drafts, *stops)
    n = len(requests[0].tokens)
    kv_lens = [n + (PAD_PREFIX_LEN if r.is_padded else r.prefix) for r in requests]
    facts = [(row, n, r.wants_token) for row, r in zip(row_ids, requests, strict=True)]
    parents = None
    if not chains:
        parents = torch.tensor([r.parents for r in requests], dtype=torch.int32)
    return Round(
        CommittedRows(state[:, 0], state[:, 1], history),
        EndRules(rules[:, 2:], rules[:, 0]),
        SampledTokens(
            facts=torch.tensor(facts, dtype=torch.int32),
            row_ids=torch.tensor(row_ids),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            token_ids=torch.tensor([r.sampled for r in requests]),
            finite=torch.tensor([[row not in r.failed for row in range(n)] for r in requests]),
        ),
        torch.full((reqs, 2 + max_path), RUBBISH, dtype=torch.int32),
        Drafts(torch.tensor([r.tokens for r in requests]), parents, rules[:, 1]),
        Accepted(torch.full((reqs, max_path), RUBBISH), torch.full((reqs,), RUBBISH)),
    )


def wanted_after(made: Round, verdicts: Sequence[Verdict]) -> dict[str, Tensor]:
    """What commit may write, by the walked verdicts; the round has not run yet."""
    max_path, n = made.accepted.path.shape[1], made.drafts.tokens.shape[1]
    rows = CommittedRows(*(column.clone() for column in made.rows))
    kv_committed, finish, token_ids = (column.numpy() for column in rows)  # the same memory
    sampled = made.sampled
    facts = zip(
        sampled.row_ids.tolist(), sampled.kv_lens.tolist(), sampled.facts.tolist(), strict=True
    )
    path, last, results = [], [], []
    for req, ((row, kv_len, (_, _, wants)), verdict) in enumerate(
        zip(facts, verdicts, strict=True)
    ):
        num = len(verdict.emitted)
        path.append([*verdict.path, *range(num, max_path)])
        last.append(req * n + max(num - 1, 0))
        results.append([num, verdict.code, *verdict.emitted, *[0] * (max_path - num)])
        if row != PAD_ROW:
            first = kv_len - n + 1
            kv_committed[row] = first - 1 + num if wants else kv_len
            finish[row] = verdict.code
            token_ids[row, first : first + num] = verdict.emitted
    accepted = Accepted(torch.tensor(path), torch.tensor(last))
    wanted = Round(rows, made.ends, sampled, torch.tensor(results).int(), made.drafts, accepted)
    return wanted.written()


def assert_walks(
    commit: Commit, requests: Sequence[Request], max_path: int, *, chains: bool = False
) -> None:
    """Run a round of them; table and outputs are those of the plain walk, to the last entry."""
    made = make_round(requests, max_path, chains=chains)
    wanted = wanted_after(made, [walk(request, max_path) for request in requests])
    commit(*made)
    assert_same(made.written(), wanted)


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Compare every entry of the table and of the outputs."""
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
