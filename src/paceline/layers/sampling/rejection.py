"""Rejection: which drafts of a chain are kept, and what is said where one is not.

A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)), where p is the distribution
that plain sampling draws from; else a token is drawn from max(p - q, 0), normalised.  Either way
what is said follows p (Leviathan et al. 2023, Chen et al. 2023), if the draft, the coin and the
second draw are independent.

Worked example: one draft, a vocabulary of three.

    p [0.5 0.3 0.2]    q [0.2 0.7 0.1]    drafted: token 1
    kept where coin * 0.7 < 0.3; else max(p - q, 0) = [0.3 0 0.1]: token 0 or 2, three to one
    token 0 is said with probability 0.2 + 0.7 * 4/7 * 3/4 = 0.5, token 1 with 0.7 * 3/7 = 0.3
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DrawnDrafts(NamedTuple):
    """Drafts of chains, drawn from distributions that come with them."""

    tokens: Tensor  # [reqs, num_steps]  int64
    q: Tensor  # [reqs, num_steps, draft vocab]  float32  0 or NaN: the draft is not kept
    d2t: Tensor | None  # [draft vocab]  int64  token id = draft id + d2t; None: they are equal


class PlainRows(NamedTuple):
    """What plain sampling makes of rows = request x position: num_steps + 1 of each request."""

    scores: Tensor  # [rows, vocab]  float32  their argmax is what it says
    law: Tensor  # [rows, vocab]  float32  logits of p, -inf where filtered out
    noise: Tensor  # [rows, vocab]  float32  standard Gumbel, independent of drafts and coins
    coins: Tensor  # [rows]  float32  uniform in (0, 1]
    drafts: Tensor  # [rows]  bool  False: the request is greedy, or does not draft


def reject(plain: PlainRows, drawn: DrawnDrafts) -> Tensor:
    """[rows] int64: the draft behind each row where it is kept, else what is said in its place.

    The last row of a request, and every row of one that does not draft, says what plain sampling
    does: a greedy draft is kept where it is the argmax.  Device-only, static shapes, recordable;
    mutates nothing.
    """
    reqs, steps = drawn.tokens.shape
    vocab_size = plain.law.shape[1]
    scores, law, noise = (x.view(reqs, steps + 1, vocab_size) for x in plain[:3])
    coins, drafts = (x.view(reqs, steps + 1)[:, :-1] for x in plain[3:])
    p, q = law[:, :-1].softmax(-1), _over_vocabulary(drawn, vocab_size)
    at = drawn.tokens.unsqueeze(2)
    kept = drafts & _is_kept(coins, p.gather(2, at).squeeze(2), q.gather(2, at).squeeze(2))
    second = _residual(p, q).log() + noise[:, :-1]
    second = torch.where(drafts.unsqueeze(2), second, scores[:, :-1])
    said = torch.where(kept, drawn.tokens, second.argmax(-1))
    return torch.cat((said, scores[:, -1:].argmax(-1)), dim=1).flatten()


def _is_kept(coins: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """p, q: [reqs, num_steps] float32, the probabilities of the drafts."""
    return (q > 0) & (coins * q < p)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalised; p where rounding leaves nothing of it, or q is NaN."""
    left = (p - q).clamp_(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def _over_vocabulary(drawn: DrawnDrafts, vocab_size: int) -> Tensor:
    """q by the target's token ids: [reqs, num_steps, vocab] float32."""
    if drawn.d2t is None:
        return drawn.q
    ids = torch.arange(drawn.q.shape[2], device=drawn.q.device) + drawn.d2t
    spread = drawn.q.new_zeros(*drawn.tokens.shape, vocab_size)
    return spread.index_add_(2, ids, drawn.q)
