"""Rope as a model has it: how frequencies are scaled, which dimensions turn by which axis.  No
torch.
"""

import math
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate


class RopeKind(Enum):
    """How rotary frequencies are scaled beyond the trained context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary table.  Fields that a kind does not use keep their defaults."""

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None  # llama3, yarn, longrope: the trained context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    attention_factor: float | None = None  # yarn, longrope
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factors: tuple[float, ...] = ()  # [rotary_dim / 2] longrope, within the trained context
    long_factors: tuple[float, ...] = ()  # [rotary_dim / 2] longrope, beyond it
    sections: tuple[int, ...] = ()  # [axes] pairs of dimensions that turn by each axis of
    # positions, rotary_dim / 2 in all; (): positions have one axis
    interleaved: bool = False  # axes take turns pair by pair, and what is left is the first's

    @property
    def short_context(self) -> int | None:
        """The longest context limit that is served with longrope's short factors; None for a rope
        that has one set of frequencies."""
        return self.original_max_position if self.kind is RopeKind.LONGROPE else None

    @property
    def axes(self) -> int:
        """Numbers that say where a token stands."""
        return max(len(self.sections), 1)

    @property
    def axis_columns(self) -> tuple[range, ...]:
        """[axes] the pairs that turn by each, a later axis before those ahead; (): one has all.

        Sections 2, 1, 1: pairs t t h w; interleaved t h w t.
        """
        ends, axes = list(accumulate(self.sections)), len(self.sections)
        if self.interleaved and ends:
            turns = (range(a, axes * num, axes) for a, num in enumerate(self.sections) if a)
            return (range(ends[-1]), *turns)
        return tuple(range(end - num, end) for end, num in zip(ends, self.sections, strict=True))


def yarn_mscale(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1: what a context longer by `factor` sharpens scores by (YaRN,
    section 3.4; `weight` is DeepSeek-V2's)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
