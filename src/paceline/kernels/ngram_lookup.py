"""ngram_lookup: drafts copied from where the end of a request's own history occurred before.

A match ends at position j < n - 1 and is as long as the suffix that ends at n - 1 equals what ends
at j, at most max_n and at least min_n tokens.  The longest match wins, among equal ones the most
recent (prompt lookup decoding, github apoorvumang/prompt-lookup-decoding).  Its drafts are the
tokens behind j; where these reach the end of the history they start again behind j, as an
overlapping copy does (Ziv, Lempel 1977), so that a loop of any period is drafted to full depth.
Further branches of a tree come from the next best matches whose first draft is a new one.

Worked example: n = 9, the root is the last token; min_n 1, max_n 3; 3 steps.

    history   a b c x a b d a b          position 8 is the root
    matches   j = 5: a b (2), then d     j = 1: a b (2), then c     j = 5 is more recent
    chain     [b | d a b]
    topk 2, 6 draft tokens: branches of 3 and 2 rows
    tokens    [b | d a b | c x]
    parents   [-1 | 0 1 2 | 0 4]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import KernelArgumentError
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type


class NgramDrafts(NamedTuple):
    """A tree of chains for every request; branch b > 0 begins num_steps rows behind the one before.

    Rows without a match hold the root's token and, in a tree, hang nowhere.
    """

    tokens: Tensor  # [reqs, num_draft_tokens]  int64  column 0: the root
    parents: Tensor | None  # [reqs, num_draft_tokens]  int32  -1: root, no match; None: a chain


def ngram_lookup_reference(
    history: Tensor, row_ids: Tensor, known: Tensor, *, shape: DraftShape, min_n: int, max_n: int
) -> NgramDrafts:
    """The definition, and the CPU's path; arguments as `ngram_lookup`."""
    tokens = history.index_select(0, row_ids)  # [reqs, max_tokens]
    last = known.long().unsqueeze(1) - 1  # [reqs, 1]
    matches = _matches(tokens, last, min_n=min_n, max_n=max_n)
    behind = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)  # the token behind each position
    steps = torch.arange(shape.num_steps, device=history.device)
    roots = tokens.gather(1, last)
    chains, found = [], []
    for _ in range(num_branches(shape)):
        best = matches.amax(1, keepdim=True)
        is_found = best >= 0
        end = (best % tokens.shape[1]).where(is_found, 0)
        period = (last - end).clamp(min=1)
        chain = tokens.gather(1, end + 1 + steps % period).where(is_found, roots)
        matches = matches.masked_fill(behind == chain[:, :1], -1)
        chains.append(chain)
        found.append(is_found.expand_as(chain))
    drafts = torch.cat(chains, dim=1)[:, : shape.num_draft_tokens - 1]
    spare = roots.expand(-1, shape.num_draft_tokens - 1 - drafts.shape[1])
    drafted = torch.cat((roots, drafts, spare), dim=1).long()
    parents = None if shape.is_chain else _parents(torch.cat(found, dim=1), shape)
    return NgramDrafts(drafted, parents)


def num_branches(shape: DraftShape) -> int:
    """How many matches a tree has rows for; the last may have rows for a part of its chain."""
    return min(shape.topk, -(-(shape.num_draft_tokens - 1) // shape.num_steps))


def _matches(tokens: Tensor, last: Tensor, *, min_n: int, max_n: int) -> Tensor:
    """[reqs, max_tokens] int64: length * max_tokens + position of a match, or -1."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_alive = columns < last
    lengths = torch.zeros_like(is_alive, dtype=torch.int64)
    for back in range(min(max_n, tokens.shape[1])):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        is_alive = is_alive & (tokens.roll(back, dims=1) == wanted) & (columns >= back)
        lengths = lengths + is_alive
    return (lengths * tokens.shape[1] + columns).masked_fill(lengths < min_n, -1)


def _parents(found: Tensor, shape: DraftShape) -> Tensor:
    """[reqs, num_draft_tokens] int32; found: [reqs, branches * num_steps] bool, of each draft."""
    rows = torch.arange(shape.num_draft_tokens - 1, dtype=torch.int32, device=found.device)
    above = rows.masked_fill(rows % shape.num_steps == 0, 0)  # row r + 1 hangs on row r or the root
    found = found[:, : len(rows)]
    spare = (0, len(rows) - found.shape[1])
    parents = torch.where(torch.nn.functional.pad(found, spare), above, -1)
    return torch.nn.functional.pad(parents, (1, 0), value=-1)


def _ngram_lookup_cuda(
    history: Tensor,
    row_ids: Tensor,
    known: Tensor,
    min_n: int,
    max_n: int,
    num_steps: int,
    branches: int,
    tokens: Tensor,
    parents: Tensor | None,
) -> None:
    from paceline.kernels._triton.ngram_lookup import Search, launch_ngram_lookup

    search = Search(min_n=min_n, max_n=max_n, num_steps=num_steps, branches=branches)
    launch_ngram_lookup(history, row_ids, known, NgramDrafts(tokens, parents), search=search)


_NGRAM_LOOKUP = define_op(
    "ngram_lookup(Tensor history, Tensor row_ids, Tensor known, int min_n, int max_n, "
    "int num_steps, int branches, Tensor(a!) tokens, Tensor(b!)? parents) -> ()",
    cpu=None,
    cuda=_ngram_lookup_cuda,
)


def ngram_lookup(
    history: Tensor, row_ids: Tensor, known: Tensor, *, shape: DraftShape, min_n: int, max_n: int
) -> NgramDrafts:
    """Drafts for every request from its own history.

    history: [table rows, max_tokens] int32, the last dimension contiguous; row_ids: [reqs] int64;
    known: [reqs] int32 or int64, tokens known in the row, at least 1; min_n, max_n: the shortest
    and the longest match.  Mutates nothing.  On a CPU these are torch's operators, which a recorded
    graph replays on fixed storages.  Graph-safe: one program per request, whose loop ends at
    `known`.  Raises KernelArgumentError.
    """
    _check(history, row_ids, known)
    if not 1 <= min_n <= max_n:
        raise KernelArgumentError.about(
            "min_n",
            expected=f"1 to max_n, which is {max_n}",
            got=min_n,
            remedy="lower min_n, or raise max_n",
        )
    if device_type(history.device) == "cpu":
        return ngram_lookup_reference(
            history, row_ids, known, shape=shape, min_n=min_n, max_n=max_n
        )
    size = (row_ids.shape[0], shape.num_draft_tokens)
    tokens = torch.empty(size, dtype=torch.int64, device=history.device)
    parents = None
    if not shape.is_chain:
        parents = torch.empty(size, dtype=torch.int32, device=history.device)
    branches = num_branches(shape)
    _NGRAM_LOOKUP(history, row_ids, known, min_n, max_n, shape.num_steps, branches, tokens, parents)
    return NgramDrafts(tokens, parents)


def _check(history: Tensor, row_ids: Tensor, known: Tensor) -> None:
    if history.ndim != 2 or history.dtype != torch.int32 or history.stride(1) != 1:
        reject(
            "history",
            expected="int32 [table rows, max_tokens], contiguous rows",
            got=history,
            remedy="pass token_ids of the request table",
        )
    reqs = row_ids.shape[0]
    if known.shape != (reqs,) or known.dtype not in (torch.int32, torch.int64):
        reject(
            "known",
            expected=f"int32 or int64 [{reqs}], one per request",
            got=known,
            remedy="pass prefix_lens + 1 of the round",
        )
