"""Cases that take the ways they can run in turn: all of them would show the same twice."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def in_turn(cases: Iterable[str], ways: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Every pair as (case, *values of the way); quick are the first case in the first way, the
    second in the second, and so on."""
    return [
        pytest.param(
            case,
            *values,
            id=f"{name}-{case}",
            marks=() if number % len(ways) == turn else pytest.mark.slow,
        )
        for number, case in enumerate(cases)
        for turn, (name, values) in enumerate(ways.items())
    ]
