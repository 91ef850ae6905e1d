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
from paceline.core.errors import KernelArgumentError, message
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


class NgramDrafts(NamedTuple):
    """A tree of chains for every request; branch b > 0 begins num_steps rows behind the one before.

    Rows without a match hold the root's token and, in a tree, hang nowhere.
    """

    tokens: Tensor  # [reqs, num_draft_tokens]  int64  column 0: the root
    parents: Tensor | None  # [reqs, num_draft_tokens]  int32  -1: the root, no match.  None: a chain


def ngram_lookup_reference(
    history: Tensor, row_ids: Tensor, known: Tensor, *, shape: DraftShape, min_n: int, max_n: int
) -> NgramDrafts:
    """The definition, and the CPU's path; arguments as `ngram_lookup`."""
    tokens = history.index_select(0, row_ids)  # [reqs, max_tokens]
    last = known.long().unsqueeze(1) - 1  # [reqs, 1]
    matches = _matches(tokens, last, min_n=min_n, max_n=max_n)
    roots = tokens.gather(1, last)
    chains, found = [], []
    behind = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)  # the token behind each position
    steps = torch.arange(shape.num_steps, device=history.device)
    for _ in range(num_branches(shape)):
        best = matches.amax(1, keepdim=True)
        is_found = best >= 0
        end = (best % tokens.shape[1]).minimum(last - 1).clamp(min=0)
        period = (last - end).clamp(min=1)
        chain = tokens.gather(1, end + 1 + steps % period)
        chains.append(chain.where(is_found, roots))
        found.append(is_found.expand_as(chain))
        matches = matches.masked_fill(behind == chain[:, :1], -1)
    room = shape.num_draft_tokens - 1
    spare = room - room_of(shape)
    drafts = torch.cat((*chains, roots.expand(-1, spare)), dim=1)[:, :room]
    hangs = torch.cat((*found, torch.zeros_like(roots, dtype=torch.bool).expand(-1, spare)), dim=1)
    drafted = torch.cat((roots, drafts), dim=1).long()
    return NgramDrafts(drafted, None if shape.is_chain else _parents(hangs[:, :room], shape))
