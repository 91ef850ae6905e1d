"""Greedy decoding with drafts, step by step in plain torch: what an engine's rounds must add up to.

The target's greedy text and hidden states are given; a round at committed length L drafts from
position L - 1, whose token is the root, and takes the drafts that the text agrees with.  Nothing is
cached between passes but the keys and values of step 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, log_softmax, scaled_dot_product_attention

from draft_head import DraftHead


class Shape(NamedTuple):
    """Of a round's drafts; a chain has topk 1 and num_steps drafts."""

    num_steps: int
    topk: int
    num_drafts: int


class Node(NamedTuple):
    """A draft."""

    token: int
    parent: int  # place of its parent among the drafts; -1: the root


class Prefix(NamedTuple):
    """The head's pass over a whole text, from the target's features: row p takes token p + 1."""

    k: Tensor  # [kv_heads, tokens - 1, head_dim]
    v: Tensor  # [kv_heads, tokens - 1, head_dim]
    features: Tensor  # [tokens - 1, hidden]  the head's own, of the position behind


def read_text(head: DraftHead, table: Tensor, tokens: Tensor, taps: Tensor) -> Prefix:
    """tokens [n] int64, taps [n, 3 * hidden], table [vocab, hidden] the target's embedding."""
    count = len(tokens) - 1
    feature = head.fc(taps[:count])
    positions = torch.arange(count, device=tokens.device)
    q, k, v = head.qkv(embedding(tokens[1:], table), feature, positions)
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return Prefix(k, v, head.finish(feature, attended))


class Branch(NamedTuple):
    """An end of the tree that may be continued."""

    candidate: int  # its id, -1 for the root
    token: int
    score: float  # log-probability of the path
    feature: Tensor  # [hidden]  the head's, of the position it was drafted from
    k: Tensor  # [kv_heads, drafted so far, head_dim]  of the path, without its last token
    v: Tensor


class Candidate(NamedTuple):
    token: int
    parent: int  # a candidate's id, or -1
    score: float


def draft(
    head: DraftHead, table: Tensor, prefix: Prefix, position: int, shape: Shape
) -> list[Node]:
    """Drafts of the round whose root is the token behind `position`, by candidate id.

    Candidates and their choice: EAGLE-2 (arXiv:2406.16858), section 4.
    """
    none = prefix.k[:, :0]
    frontier = [Branch(-1, -1, 0.0, prefix.features[position], none, none)]
    candidates: list[Candidate] = []
    for depth in range(shape.num_steps):
        if depth:
            frontier = [
                advance(head, table, prefix, position + depth, length=position + 1, branch=branch)
                for branch in frontier
            ]
        first, found = len(candidates), []
        for branch in frontier:
            log_probs = log_softmax(head.logits(branch.feature).float(), dim=-1)
            values, ids = log_probs.topk(shape.topk)
            for value, token in zip(values.tolist(), head.target_ids[ids].tolist(), strict=True):
                candidate = first + len(found)
                score = branch.score + value
                candidates.append(Candidate(token, branch.candidate, score))
                found.append(branch._replace(candidate=candidate, token=token, score=score))
        frontier = sorted(found, key=lambda branch: -branch.score)[: shape.topk]
    return choose(candidates, shape.num_drafts)


def advance(
    head: DraftHead, table: Tensor, prefix: Prefix, at: int, *, length: int, branch: Branch
) -> Branch:
    """The branch after the head's pass over its token at draft position `at`."""
    device = prefix.k.device
    token = torch.tensor([branch.token], device=device)
    feature = branch.feature[None]
    q, k, v = head.qkv(embedding(token, table), feature, torch.tensor([at], device=device))
    path_k, path_v = torch.cat([branch.k, k], dim=1), torch.cat([branch.v, v], dim=1)
    all_k = torch.cat([prefix.k[:, :length], path_k], dim=1)
    all_v = torch.cat([prefix.v[:, :length], path_v], dim=1)
    attended = scaled_dot_product_attention(q, all_k, all_v, enable_gqa=True)
    return branch._replace(feature=head.finish(feature, attended)[0], k=path_k, v=path_v)


def choose(candidates: list[Candidate], num_drafts: int) -> list[Node]:
    """The best by score, earlier ones first where scores are equal; ordered by id."""
    best = sorted(range(len(candidates)), key=lambda i: (-candidates[i].score, i))[:num_drafts]
    kept = sorted(best)
    place = {-1: -1} | {candidate: at for at, candidate in enumerate(kept)}
    return [Node(candidates[i].token, place[candidates[i].parent]) for i in kept]


def num_accepted(nodes: list[Node], text: list[int]) -> int:
    """How many drafts follow `text`, the tokens behind the root."""
    at, accepted = -1, 0
    for token in text:
        here = [i for i, node in enumerate(nodes) if node == Node(token, at)]
        if not here:
            break
        at, accepted = here[0], accepted + 1
    return accepted


def accepted_per_round(
    head: DraftHead, table: Tensor, tokens: Tensor, taps: Tensor, *, num_prompt: int, shape: Shape
) -> list[int]:
    """Drafts accepted in each round of a text [n] int64 whose first num_prompt tokens are given.

    taps [n, 3 * hidden].  The first token behind the prompt comes from the prefill.  A round emits
    one token more than it accepts; the text's last token ends its round, so it counts as emitted.
    """
    prefix, text = read_text(head, table, tokens, taps), tokens.tolist()
    accepted, length = [], num_prompt
    while length + 1 < len(text):
        nodes = draft(head, table, prefix, length - 1, shape)
        accepted.append(num_accepted(nodes, text[length + 1 : -1]))
        length += accepted[-1] + 1
    return accepted
