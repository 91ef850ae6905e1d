"""commit: what a step sampled, back into the rows of its requests; and the results the host reads.

A step samples behind n rows of each request: one in a plain step, however far it extends; in a
round its root and the drafts below it.  first = kv_len - n tokens are committed without them.  The
walk starts at row 0, the root, and goes on to the first child whose token is what was sampled; it
emits what was sampled at each row it stood on, and first + emitted tokens are committed.  A request
that wants no token (a chunk that is not its last) commits its kv_len, and never fails.

A row is frozen at an end token or a stop id (emitted), at its length limit (emitted), or where
logits are not finite (not emitted, nor committed); the first token at which one of these happens is
the last, and of its codes the first in the order failed, stopped, at its limit is reported.

Worked example: a round, 7 tokens committed, kv_len 11.

    tokens    [a b c d]  parents [-1 0 0 1]      b and c follow a, d follows b
    sampled   [c x y z]                          the target's token behind each
    path      [0 2 2]                            a, c; behind them an entry is its own index
    results   [2 0 c y 0]                        two tokens, still running; 9 tokens committed
    last      1                                  c's row, once the path lies together
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type


class CommittedRows(NamedTuple):
    """The columns that commit writes, one row per request; row 0 holds the padding facts."""

    kv_committed: Tensor  # [rows]  int32  tokens whose KV is in the cache
    finish: Tensor  # [rows]  int32  FinishCode
    token_ids: Tensor  # [rows, max_tokens]  int32


class EndRules(NamedTuple):
    """When a row is finished."""

    stop_ids: Tensor  # [rows, max_stop_ids]  int64  unused entries equal no token
    max_len: Tensor  # [rows]  int64  finished once this many tokens are known


class SampledTokens(NamedTuple):
    """What a step knows of its requests, and what it sampled behind n rows of each."""

    facts: Tensor  # [padded_reqs, 3]  int32  row, extend length, emits (0 or 1)
    row_ids: Tensor  # [padded_reqs]  int64  padding: PAD_ROW
    kv_lens: Tensor  # [padded_reqs]  int32
    token_ids: Tensor  # [padded_reqs, n]  int64  sampled
    finite: Tensor  # [padded_reqs, n]  bool  False: the row's logits held NaN or inf


class Drafts(NamedTuple):
    """The rows behind which a round sampled."""

    tokens: Tensor  # [padded_reqs, n]  int64  column 0: the root
    parents: Tensor | None  # [padded_reqs, n]  int32  an earlier row, or -1; None: a chain
    max_drafts: Tensor  # [rows]  int64  most drafts a request accepts; 0: it does not draft


class Accepted(NamedTuple):
    """What a round accepted."""

    path: Tensor  # [padded_reqs, max_path]  int64  rows that emitted, the root first; behind them
    # each entry's own index
    last: Tensor  # [padded_reqs]  int64  row of the step, in chain order: the last that emitted


class _Walk(NamedTuple):
    """The way down each request's tree, before anything ends it."""

    nodes: Tensor  # [padded_reqs, max_path]  int64  the row it stands on; any row when it has ended
    reached: Tensor  # [padded_reqs, max_path]  bool
    said: Tensor  # [padded_reqs, max_path]  int64  the token emitted there


def commit_reference(
    rows: CommittedRows,
    ends: EndRules,
    sampled: SampledTokens,
    results: Tensor,
    drafts: Drafts | None = None,
    accepted: Accepted | None = None,
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `commit`."""
    if drafts is None or accepted is None:
        _commit_one(rows, ends, sampled, results)
        return
    (reqs, n), max_path = sampled.token_ids.shape, accepted.path.shape[1]
    walk = _walk(sampled, drafts, max_path)
    steps = torch.arange(max_path, device=results.device)
    is_live = sampled.row_ids != PAD_ROW
    wants_token = is_live & (sampled.facts[:, 2] != 0)
    first = sampled.kv_lens - n
    finite = sampled.finite.gather(1, walk.nodes)
    stop_ids = ends.stop_ids.index_select(0, sampled.row_ids).unsqueeze(1)
    known = first.unsqueeze(1) + 2 + steps
    at_limit = known >= ends.max_len.index_select(0, sampled.row_ids).unsqueeze(1)
    codes = at_limit.int().mul_(int(FinishCode.LENGTH))
    is_stop = (stop_ids == walk.said.unsqueeze(2)).any(2)
    codes.masked_fill_(is_stop, int(FinishCode.STOP_TOKEN))
    codes.masked_fill_(~finite, int(FinishCode.NON_FINITE))
    ended = (codes != 0).int()
    goes_on = walk.reached & (ended.cumsum(1) == ended) & wants_token.unsqueeze(1)
    emits = goes_on & finite

    num_emitted = emits.sum(1, dtype=torch.int32)
    emitted = walk.said * emits
    finish = (codes * goes_on).amax(1)
    accepted.path.copy_(torch.where(emits, walk.nodes, steps))
    first_rows = torch.arange(reqs, device=results.device) * n
    torch.add(first_rows, (num_emitted - 1).clamp_(min=0), out=accepted.last)
    results[:, 0].copy_(num_emitted)
    results[:, 1].copy_(finish)
    results[:, 2:].copy_(emitted)

    kv_committed = (first + num_emitted).where(wants_token, sampled.kv_lens)
    rows.kv_committed.index_copy_(0, sampled.row_ids, kv_committed.where(is_live, PAD_PREFIX_LEN))
    rows.finish.index_copy_(0, sampled.row_ids, finish)
    # What emits nothing writes token 0 at [PAD_ROW, 0], all of them the same value.
    flat_rows = (sampled.row_ids * rows.token_ids.shape[1]).unsqueeze(1)
    index = (flat_rows + known - 1) * emits
    rows.token_ids.view(-1).index_copy_(0, index.view(-1), emitted.int().view(-1))


def _walk(sampled: SampledTokens, drafts: Drafts, max_path: int) -> _Walk:
    """From the root, from child to child."""
    reqs, n = drafts.tokens.shape
    columns = torch.arange(n, device=drafts.tokens.device)
    parents = (columns - 1).expand(reqs, n) if drafts.parents is None else drafts.parents
    is_child = parents.unsqueeze(1) == columns.unsqueeze(1)  # [padded_reqs, parent, child]
    fits = is_child & (drafts.tokens.unsqueeze(1) == sampled.token_ids.unsqueeze(2))
    next_rows = columns.expand(reqs, n, n).where(fits, n).amin(2)  # n: there is none
    next_rows = torch.nn.functional.pad(next_rows, (0, 1), value=n)
    nodes = [sampled.row_ids.new_zeros(reqs, 1)]
    for _ in range(max_path - 1):
        nodes.append(next_rows.gather(1, nodes[-1]))
    path = torch.cat(nodes, dim=1)
    most = drafts.max_drafts.index_select(0, sampled.row_ids)
    reached = (path < n) & (torch.arange(max_path, device=path.device) <= most.unsqueeze(1))
    path = path.clamp_(max=n - 1)
    return _Walk(path, reached, sampled.token_ids.gather(1, path))


def _commit_one(
    rows: CommittedRows, ends: EndRules, sampled: SampledTokens, results: Tensor
) -> None:
    """The same of one row each, without a walk: a plain step pays for nothing else."""
    token_ids, finite = sampled.token_ids[:, 0], sampled.finite[:, 0]
    is_live = sampled.row_ids != PAD_ROW
    wants_token = is_live & (sampled.facts[:, 2] != 0)
    emits = wants_token & finite
    failed = wants_token ^ emits

    kv_committed = (sampled.kv_lens - failed.int()).where(is_live, PAD_PREFIX_LEN)
    rows.kv_committed.index_copy_(0, sampled.row_ids, kv_committed)

    # What emits nothing writes token 0 at [PAD_ROW, 0], all of them the same value.
    index = (sampled.row_ids * rows.token_ids.shape[1] + sampled.kv_lens) * emits
    emitted = (token_ids * emits).int()
    rows.token_ids.view(-1).index_copy_(0, index, emitted)

    stop_ids = ends.stop_ids.index_select(0, sampled.row_ids)
    is_stop = (stop_ids == sampled.token_ids).any(1) & emits
    known = sampled.kv_lens + 1
    at_limit = (known >= ends.max_len.index_select(0, sampled.row_ids)) & emits
    finish = at_limit.int().mul_(int(FinishCode.LENGTH))
    finish.masked_fill_(is_stop, int(FinishCode.STOP_TOKEN))
    finish.masked_fill_(failed, int(FinishCode.NON_FINITE))
    rows.finish.index_copy_(0, sampled.row_ids, finish)
    torch.stack((emits.int(), finish, emitted), dim=1, out=results)


def _commit_cuda(*fields: Any) -> None:
    from paceline.kernels._triton.commit import launch_commit

    rows, ends, sampled = CommittedRows(*fields[:3]), EndRules(*fields[3:5]), fields[5:10]
    drafts = accepted = None
    if fields[11] is not None:
        drafts, accepted = Drafts(*fields[11:14]), Accepted(*fields[14:])
    launch_commit(rows, ends, SampledTokens(*sampled), fields[10], drafts, accepted)


_COMMIT = define_op(
    "commit(Tensor(a!) kv_committed, Tensor(b!) finish, Tensor(c!) history, Tensor stop_ids, "
    "Tensor max_len, Tensor facts, Tensor row_ids, Tensor kv_lens, Tensor token_ids, "
    "Tensor finite, Tensor(d!) results, Tensor? tokens, Tensor? parents, Tensor? max_drafts, "
    "Tensor(e!)? path, Tensor(f!)? last) -> ()",
    cpu=None,
    cuda=_commit_cuda,
)
_NO_DRAFTS = (None,) * (len(Drafts._fields) + len(Accepted._fields))


def commit(
    rows: CommittedRows,
    ends: EndRules,
    sampled: SampledTokens,
    results: Tensor,
    drafts: Drafts | None = None,
    accepted: Accepted | None = None,
) -> None:
    """Emit what each live request sampled, as far as its drafts agree, and commit as much.

    results: [padded_reqs, 2 + max_path] int32 tokens emitted, FinishCode, their ids, 0s.  drafts,
    accepted: of a round; None: the step samples behind one row of each request, and max_path is 1.
    Mutates `rows`, `results` and `accepted`; row 0 keeps the padding facts.  A live row is in a
    step once.  On a CPU these are torch's operators, which a recorded graph replays on fixed
    storages.  Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    _check_rows(sampled, results, drafts, accepted)
    if device_type(results.device) == "cpu":
        commit_reference(rows, ends, sampled, results, drafts, accepted)
        return
    of_round = _NO_DRAFTS if drafts is None or accepted is None else (*drafts, *accepted)
    _COMMIT(*rows, *ends, *sampled, results, *of_round)


def _check_rows(
    sampled: SampledTokens, results: Tensor, drafts: Drafts | None, accepted: Accepted | None
) -> None:
    assert (drafts is None) is (accepted is None), "a round's drafts and what is accepted of them"
    reqs, n, max_path = sampled.row_ids.shape[0], 1, 1
    wanted = []
    if drafts is not None and accepted is not None:
        n, max_path = drafts.tokens.shape[-1], accepted.path.shape[-1]
        wanted = [
            ("tokens", drafts.tokens, torch.int64, (reqs, n)),
            ("path", accepted.path, torch.int64, (reqs, max_path)),
            ("last", accepted.last, torch.int64, (reqs,)),
        ]
        if drafts.parents is not None:
            wanted.append(("parents", drafts.parents, torch.int32, (reqs, n)))
    wanted += [
        ("token_ids", sampled.token_ids, torch.int64, (reqs, n)),
        ("finite", sampled.finite, torch.bool, (reqs, n)),
        ("results", results, torch.int32, (reqs, 2 + max_path)),
    ]
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            reject(
                name,
                expected=f"contiguous {dtype} {list(shape)}",
                got=tensor,
                remedy="pass what was sampled behind as many rows of each request, and the step's "
                "own results",
            )
