"""Cells: products of axes, and few of them that hold every pair of values of two axes."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Cell = Mapping[str, Any]  # axis -> value
COVERS = 60  # tried by `pairwise`
# What a value multiplies a cell's time by, roughly: poison and a second run, and work done again.
DEAR = {"deferred": 2.5, "tight": 1.3}


def every_cell(axes: Mapping[str, tuple[Any, ...]]) -> list[Cell]:
    """The full product."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(axes: Mapping[str, tuple[Any, ...]]) -> list[Cell]:
    """Few cells that hold every pair of values of two axes: the cheapest of many covers."""
    covers = (_cover(axes, random.Random(seed)) for seed in range(COVERS))
    return min(covers, key=lambda cells: sum(map(_cost, cells)))


def _cost(cell: Cell) -> float:
    return math.prod(DEAR.get(value, 1.0) for value in cell.values())


def _cover(axes: Mapping[str, tuple[Any, ...]], rng: random.Random) -> list[Cell]:
    """Each cell begins with a pair that is left, and takes the values that hold most others; of
    those that hold as many, the cheapest.  Sets of values are bits of a number: to count is most
    of the work."""
    bit = {item: 1 << at for at, item in enumerate((n, v) for n in axes for v in axes[n])}
    pairs = [
        ((one, a), (other, b))
        for one, other in itertools.combinations(axes, 2)
        for a, b in itertools.product(axes[one], axes[other])
    ]
    left, cells = dict.fromkeys(pairs), []
    partners = dict.fromkeys(bit, 0)  # value -> those that it is left with
    for one, other in pairs:
        partners[one] |= bit[other]
        partners[other] |= bit[one]
    while left:
        cell = dict(rng.choice(list(left)))
        held = sum(bit[item] for item in cell.items())
        for name in rng.sample([name for name in axes if name not in cell], len(axes) - 2):
            cell[name] = max(
                rng.sample(axes[name], len(axes[name])),
                key=lambda value: (
                    (partners[name, value] & held).bit_count(),
                    -DEAR.get(value, 1.0),
                ),
            )
            held |= bit[name, cell[name]]
        cells.append({name: cell[name] for name in axes})
        for one, other in itertools.combinations(cells[-1].items(), 2):
            left.pop((one, other), None)
            partners[one] &= ~bit[other]
            partners[other] &= ~bit[one]
    return cells


def all_with_a_cover(axes: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """The full product as parameters of a test; what is beyond a pairwise cover is slow."""
    cover = pairwise(axes)
    return slow_unless(cover.__contains__, every_cell(axes))


def slow_unless(is_quick: Callable[[Cell], bool], cells: Iterable[Cell]) -> list[Any]:
    """Cells as parameters of a test."""
    return [
        pytest.param(cell, id=cell_name(cell), marks=() if is_quick(cell) else pytest.mark.slow)
        for cell in cells
    ]


def cell_name(cell: Cell) -> str:
    short = {"enforce_eager": ("graph", "eager"), "enable_prefix_cache": ("nocache", "cache")}
    short["overlap"] = ("twin", "overlap")
    words = [short[k][v] if k in short else f"{v}" for k, v in cell.items()]
    return "-".join(words)
