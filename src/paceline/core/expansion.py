"""Expansion: which rows of a step attend to keys and values that are expanded from latents.

Rows of decode stay absorbed; they stand first.  Behind them a row of many tokens, and all behind
that one, are expanded: among themselves, and over their prefixes in pieces.  Pure Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.modes import MaskKind
from paceline.core.step import Step


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """A range of positions, of which each request has the rows that its prefix has there."""

    first: int
    end: int
    lens: tuple[int, ...]  # [num_reqs] rows of each, at most

    @property
    def num_rows(self) -> int:
        """Of all requests, at most."""
        return sum(self.lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """What is expanded in a step; host integers, of which lengths are bounds."""

    first_row: int  # of the step's rows; those before are absorbed
    first_token: int  # of that row
    longest_before: int  # tokens of a row that is absorbed, at most; 0: there is none
    extend_lens: tuple[int, ...]  # [num_reqs] tokens of each row that is expanded
    pieces: tuple[PrefixPiece, ...]  # of prefixes, in order


def expansion_of(step: Step, *, least: int, most_rows: int) -> Expansion | None:
    """What of a step is expanded; None: nothing is.

    least: tokens of a row that begins it, 0: none does.  most_rows: of a piece.
    """
    if not least or not step.is_ragged or step.is_round or step.mask is not MaskKind.CAUSAL:
        return None
    lens = step.layout.extend_lens
    first = next((row for row, num in enumerate(lens) if num >= max(least, 2)), None)
    if first is None:
        return None
    return Expansion(
        first_row=first,
        first_token=sum(lens[:first]),
        longest_before=max(lens[:first], default=0),
        extend_lens=tuple(lens[first:]),
        pieces=prefix_pieces(step.prefix_lens_bound[first:], most_rows),
    )


def whole_step(most_rows: int, num_pieces: int) -> Expansion:
    """Of a step of one request, whose rows are all expanded, with so many full pieces: what is
    counted, or compiled, before there is a step."""
    firsts = range(0, most_rows * num_pieces, most_rows)
    whole = (most_rows,)
    return Expansion(
        first_row=0,
        first_token=0,
        longest_before=0,
        extend_lens=whole,
        pieces=tuple(PrefixPiece(first, first + most_rows, whole) for first in firsts),
    )


def most_pieces(longest: int, *, reqs: int, most_rows: int) -> int:
    """Pieces of the prefixes of a step, at most: all but the last hold a share of `most_rows` of
    each of at most `reqs` requests, whose prefixes have at most `longest` rows."""
    return -(-longest // max(1, most_rows // reqs))


def prefix_pieces(prefix_lens: Sequence[int], most_rows: int) -> tuple[PrefixPiece, ...]:
    """As few pieces as hold all rows of the prefixes, of at most `most_rows` rows each.

    Worked example, prefixes of 0, 1, 4 and 5 rows, 6 to a piece: the first ends at position 2,
    where it holds 1 + 2 + 2 rows, and a row more of each would be 7; the second has 2 + 3.
    """
    pieces: list[PrefixPiece] = []
    first, live = 0, sorted(length for length in prefix_lens if length > 0)
    assert len(live) <= most_rows, f"{len(live)} prefixes, {most_rows} rows to a piece"
    while live:
        end, room = first, most_rows
        for index, length in enumerate(live):
            share = room // (len(live) - index)  # of each that is as long, or longer
            end = min(length, first + share)
            if end < length:
                break
            room -= length - first
        assert end > first, "a piece holds a row of each prefix that is left"
        lens = tuple([max(0, min(length, end) - first) for length in prefix_lens])
        pieces.append(PrefixPiece(first, end, lens))
        first, live = end, [length for length in live if length > end]
    return tuple(pieces)
