"""Which rows of a step are expanded, and in which pieces their prefixes are read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.expansion import (
    Expansion,
    PrefixPiece,
    expansion_of,
    most_pieces,
    prefix_pieces,
    whole_step,
)
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout, leading_rows


def step_of(extend_lens: tuple[int, ...], **more: object) -> Step:
    rows = len(extend_lens)
    layout = StepLayout(
        rows=tuple(range(1, rows + 1)), extend_lens=extend_lens, emits=(True,) * rows
    )
    facts = {"is_ragged": True, "prefix_lens_bound": tuple(range(5, 5 + rows))} | more
    return Step(
        epoch=1, layout=layout, sampler=SamplerTier.GREEDY, logprobs=False, deltas=(), **facts
    )


def test_pieces_of_the_worked_example() -> None:
    assert prefix_pieces((0, 1, 4, 5), 6) == (
        PrefixPiece(0, 2, (0, 1, 2, 2)),
        PrefixPiece(2, 5, (0, 0, 2, 3)),
    )
    assert prefix_pieces((0, 0), 6) == ()


@settings(max_examples=40, deadline=None)
@given(lens=st.lists(st.integers(0, 40), max_size=7), most=st.integers(7, 50) | st.just(10**6))
def test_pieces_hold_every_row_once_and_no_piece_could_be_longer(lens, most) -> None:
    pieces = prefix_pieces(lens, most)
    ends = [0, *(piece.end for piece in pieces)]
    assert ends[-1] == max(lens, default=0)
    for piece, before in zip(pieces, ends, strict=False):
        assert piece.first == before < piece.end
        held = [max(0, min(length, piece.end) - piece.first) for length in lens]
        assert tuple(held) == piece.lens
        assert sum(held) == piece.num_rows <= most
        longer = sum(max(0, min(length, piece.end + 1) - piece.first) for length in lens)
        assert longer == piece.num_rows or longer > most
    assert sum(piece.num_rows for piece in pieces) == sum(lens)


def test_rows_of_decode_stay_as_they_are_and_all_behind_the_first_long_one_are_expanded() -> None:
    found = expansion_of(step_of((1, 1, 4, 9, 2)), least=5, most_rows=100)
    assert found is not None
    assert (found.first_row, found.first_token, found.longest_before) == (3, 6, 4)
    assert found.extend_lens == (9, 2)
    assert found.pieces == (PrefixPiece(0, 9, (8, 9)),)  # of prefixes of 8 and 9
    whole = expansion_of(step_of((9, 2)), least=5, most_rows=100)
    assert whole is not None
    assert (whole.first_row, whole.first_token, whole.longest_before) == (0, 0, 0)


@pytest.mark.parametrize(("num", "least"), [(5, 5), (2, 2), (2, 1)])
def test_a_row_begins_with_so_many_tokens_and_no_row_of_one(num, least) -> None:
    found = expansion_of(step_of((1, num)), least=least, most_rows=100)
    assert found is not None
    assert found.first_row == 1


def test_a_whole_step_has_full_pieces() -> None:
    pieces = (PrefixPiece(0, 6, (6,)), PrefixPiece(6, 12, (6,)))
    none_before = {"first_row": 0, "first_token": 0, "longest_before": 0}
    assert whole_step(6, 2) == Expansion(**none_before, extend_lens=(6,), pieces=pieces)


@pytest.mark.parametrize(
    ("lens", "least", "more"),
    [
        ((1, 4), 5, {}),
        ((1, 9), 0, {}),
        ((1, 1), 1, {}),
        ((9, 9), 5, {"is_round": True}),
        ((9, 9), 5, {"is_ragged": False}),
        ((9, 9), 5, {"mask": MaskKind.BLOCK}),
    ],
)
def test_other_steps_expand_nothing(lens, least, more) -> None:
    assert expansion_of(step_of(lens, **more), least=least, most_rows=100) is None


def test_leading_rows_are_a_step_of_these_alone() -> None:
    step = step_of((1, 1, 9))
    kept = leading_rows(step, 2)
    assert (kept.layout.rows, kept.layout.extend_lens) == ((1, 2), (1, 1))
    assert kept.layout.emits == (True, True)
    assert (kept.prefix_lens_bound, kept.kv_lens_bound) == ((5, 6), (6, 7))
    assert leading_rows(step, 3) == step


@pytest.mark.parametrize("lens", [(30,), (30, 30, 30), (30, 7, 30), (30, 1, 0)])
@pytest.mark.parametrize("most_rows", [3, 8, 30, 90])
def test_pieces_are_as_many_as_are_allocated_for_at_most(lens, most_rows) -> None:
    most = most_pieces(30, reqs=3, most_rows=most_rows)
    assert len(prefix_pieces(lens, most_rows)) <= most
    assert len(prefix_pieces((30, 30, 30), most_rows)) == most


def test_a_piece_holds_a_row_of_each_prefix_where_requests_outnumber_its_rows() -> None:
    assert len(prefix_pieces((30, 30), 2)) == most_pieces(30, reqs=3, most_rows=2)
