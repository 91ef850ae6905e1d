"""Percentiles of waits.  No torch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

QUANTILES = [index / 20 for index in range(21)]  # of a distribution that is drawn


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least of ascending values that is no smaller than `share` of them."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of waits, in ms."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Percentiles | None":
        """None of nothing."""
        ordered = sorted(seconds)
        if not ordered:
            return None
        p50, p90, p99, most = (1e3 * percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0))
        return cls(p50=p50, p90=p90, p99=p99, max=most)


def quantiles_ms(seconds: Iterable[float]) -> tuple[float, ...]:
    """Of QUANTILES; empty of nothing."""
    ordered = sorted(seconds)
    return tuple(1e3 * percentile(ordered, share) for share in QUANTILES) if ordered else ()


def by_share(quantiles: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a curve: (share of all in %, value)."""
    return [(100 * share, value) for share, value in zip(QUANTILES, quantiles, strict=False)]
