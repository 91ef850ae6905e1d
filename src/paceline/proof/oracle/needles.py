"""Needles: which keys each query shall find, which would betray a bug, and the query that does so.

A query prefers a handful of the keys it may see, and prefers still more the ones a classic bug
would show it: the next row, the key before the window, a sibling in the tree, another request's.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

from paceline.proof.oracle.methods.softmax import ancestors, visible_keys
from paceline.proof.rig.placement import shared_pages
from paceline.proof.suite.case import Batch, Case, Inputs

STEPS = (0.0, 0.75, 0.25, 1.0, 0.5)  # a winner's score below the best: a cap changes their ratios
# What a forbidden key leads the winners by; more would make random keys loud as well.
LEAD = {Inputs.NEEDLE: 5.0, Inputs.UNEVEN: 5.0, Inputs.RANDOM: 2.5}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a batch."""

    request: int
    index: int  # in the order of the slots


@dataclass(frozen=True, slots=True)
class Wish:
    """What one head of one query token prefers."""

    winners: tuple[Key, ...]  # visible
    forbidden: tuple[Key, ...]  # not visible


@dataclass(frozen=True, slots=True)
class Levels:
    """Scores, after scale and cap, that a case aims at."""

    winner: float  # the best of a query's winners
    forbidden: float
    soft_cap: float | None

    def uncapped(self, score: float) -> float:
        """The score that the cap turns into `score`."""
        if self.soft_cap is None:
            return score
        return self.soft_cap * math.atanh(score / self.soft_cap)


def levels(case: Case) -> Levels:
    """Winners stand far above the sum of a case's other keys; of random keys, near that sum."""
    margin = 2.0 if case.inputs is Inputs.RANDOM else 7.0
    winner = margin + math.log(case.max_kv_len)
    winner = round(4 * winner) / 4
    lead, cap = LEAD[case.inputs], case.soft_cap
    if cap is None:
        return Levels(winner, winner + lead, None)
    winner = min(max(winner, 0.5 * cap), 0.85 * cap)  # where the cap bends
    return Levels(winner, min(winner + lead, 0.97 * cap), cap)


def wishes(case: Case, batch: Batch, layer: int, random: Random) -> list[list[Wish]]:
    """[num_tokens][heads] what every head of every query token prefers."""
    return [
        _row_wishes(case, batch, layer, request, row, random)
        for request, extend in enumerate(batch.extend_lens)
        for row in range(extend)
    ]


def _row_wishes(
    case: Case, batch: Batch, layer: int, request: int, row: int, random: Random
) -> list[Wish]:
    """[heads] of one query token; the heads take turns among what does not fit into one.

    Directions of a head are few: where many keys have one of their own, as all random ones and all
    rows of a long step do, a query wants less, so that it does not find by chance what it does not
    want.
    """
    many = batch.key_lens if case.inputs is Inputs.RANDOM else batch.extend_lens
    is_crowded = many[request] > case.head_dim // 4
    most_winners = 3 if is_crowded else max(3, min(6, case.head_dim // 10))
    most_forbidden = max(2, min(4, case.head_dim // 16))
    if is_crowded:
        most_forbidden = max(1, most_forbidden // case.num_heads)
    seen = visible_keys(case, batch, layer, request, row)
    wanted = _wanted(batch, request, row, seen)
    wary = _forbidden(case, batch, request, row, seen)
    found = []
    for head in range(case.num_heads):
        middle = [seen[len(seen) // 2], random.choice(seen)] if seen else []
        anchors = wanted[:1] + _turned(wanted[1:], is_crowded * (head + row))
        winners = [*anchors[: most_winners - 1], *_turned(middle, head), *anchors]
        winners = list(dict.fromkeys(winners))[:most_winners]
        found.append(
            Wish(
                tuple(Key(request, index) for index in winners),
                tuple(_turned(wary, head + row)[:most_forbidden]),
            )
        )
    return found


def _turned(items: list[Item], turn: int) -> list[Item]:
    """The items, beginning with another one at each turn."""
    start = turn % max(1, len(items))
    return items[start:] + items[:start]


def _wanted(batch: Batch, request: int, row: int, seen: list[int]) -> list[int]:
    """Visible keys whose loss a bug would cause: the first and last, itself, the last of the
    prefix, the parent, the first of the step."""
    if not seen:
        return []
    prefix, parent = batch.prefix_lens[request], row - 1
    if batch.parents is not None:
        parent = batch.parents[request][row]
    visible = set(seen)
    anchors = (seen[0], seen[-1], prefix + row, prefix - 1, prefix + parent, prefix)
    return list(dict.fromkeys(index for index in anchors if index in visible))


def _forbidden(case: Case, batch: Batch, request: int, row: int, seen: list[int]) -> list[Key]:
    """Keys that a bug would show, the likeliest first."""
    prefix, key_lens = batch.prefix_lens[request], batch.key_lens
    kv_len = key_lens[request]
    visible = set(seen)
    first = seen[0] if seen else prefix
    near = [first - 1, prefix + row + 1, prefix + row, kv_len - 1]
    if batch.blocks is not None or case.both_ways:
        near.insert(0, seen[-1] + 1)
    if batch.parents is not None:
        tree = batch.parents[request]
        near[:0] = [prefix + other for other in ancestors(tree, row)]  # a window may hide them
        near += [prefix + other for other, parent in enumerate(tree) if parent == tree[row]]
        near += [prefix + other for other in range(len(tree))]
    near = [index for index in near if 0 <= index < kv_len and index not in visible]
    keys = [Key(request, index) for index in dict.fromkeys(near)][:5]
    other = (request + 1) % batch.num_reqs
    if other != request and key_lens[other]:
        there = min(max(prefix - 1, 0), key_lens[other] - 1)
        shared = shared_pages(case, batch) * case.page_size
        keys.insert(1, Key(other, there if there >= shared else key_lens[other] - 1))
    return keys


def find_queries(
    keys: Tensor, index: Tensor, targets: Tensor, start: Tensor, scale: float
) -> Tensor:
    """[heads, tokens, head_dim] the queries nearest to `start` whose scaled product with their
    chosen keys are the targets.

    keys: [num_keys, head_dim] float64.  index: [heads, tokens, chosen] int64, -1: none.
    targets: [heads, tokens, chosen] float64.  start: [heads, tokens, head_dim] float64.
    """
    some = (index >= 0).flatten(0, 1).any(0)  # what nobody chose would be solved for as well
    index, targets = index[:, :, some], targets[:, :, some]
    is_chosen = index >= 0
    used, place = index.clamp(min=0).unique(return_inverse=True)
    table = keys[used]  # [used, head_dim] few: the queries share what they choose
    missing = targets / scale - (start @ table.T).gather(2, place)
    gram = (table @ table.T)[place.unsqueeze(3), place.unsqueeze(2)]
    gram *= is_chosen.unsqueeze(3) & is_chosen.unsqueeze(2)
    gram.diagonal(dim1=2, dim2=3).add_(1e-4 * keys.shape[1])  # two chosen keys may be alike
    weights: Tensor = torch.linalg.solve(gram, missing * is_chosen)
    spread = start.new_zeros(*start.shape[:2], len(used)).scatter_add_(2, place, weights)
    return torch.add(start, spread @ table)
