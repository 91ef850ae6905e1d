"""What a completion tells of its rounds, where it asks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import RowDrafts
from paceline.engine.answers.completion import Completion
from paceline.engine.answers.outputs import CompletionOutput
from paceline.engine.answers.trace import Round, Trace
from paceline.engine.request import FinishReason, Request
from paceline.engine.scheduler import RequestUpdate

ROOT = 7


def test_rows_of_a_chain_hang_on_one_another():
    assert RowDrafts.of([ROOT, 10, 11, 12], None) == RowDrafts(
        token_ids=(10, 11, 12), parents=(-1, 0, 1)
    )


def test_rows_of_a_tree_hang_where_the_proposer_says():
    """The example of runner/proposer.py."""
    drafts = RowDrafts.of([ROOT, 98, 99, 100], [-1, 0, 0, 1])
    assert drafts == RowDrafts(token_ids=(98, 99, 100), parents=(-1, -1, 0))
    assert drafts.taken((99, 121)) == (1,)
    assert drafts.taken((98, 100, 122)) == (0, 2)
    assert drafts.taken((120,)) == ()


def test_rows_that_hang_nowhere_were_not_drafted():
    drafts = RowDrafts.of([ROOT, 1, 2, 3, 4, 5], [-1, 0, -1, 2, 1, 4])
    assert drafts == RowDrafts(token_ids=(1, 4, 5), parents=(-1, 0, 1))


@given(st.data())
def test_what_was_taken_is_the_path_of_what_was_emitted(data):
    parents = [-1]
    for row in range(1, data.draw(st.integers(1, 12))):
        parents.append(data.draw(st.integers(0, row - 1)))
    tokens = list(range(100, 100 + len(parents)))  # all differ
    path, at = [], 0
    while children := [row for row, parent in enumerate(parents) if parent == at and row]:
        at = data.draw(st.sampled_from(children))
        path.append(at)
    path = path[: data.draw(st.integers(0, len(path)))]
    drafts = RowDrafts.of(tokens, parents)
    taken = drafts.taken([*(tokens[row] for row in path), 99])
    assert [drafts.token_ids[each] for each in taken] == [tokens[row] for row in path]


def completion(**params):
    request = Request.make("r", [65], SamplingParams(**params), context_len=32)
    request.num_cached = 4
    return Completion(request, tokenizer=None)


DRAFTS = RowDrafts(token_ids=(10, 11), parents=(-1, 0))


def feed(made, tokens, drafts=None):
    drafted = 0 if drafts is None else len(tokens) - 1
    made.apply(RequestUpdate(made.request, tokens, (), None, (), drafted, drafts))


def test_rounds_come_with_the_growth_that_brings_their_tokens():
    made = completion(trace_tokens=True)
    feed(made, (9,))
    assert made.growth(CompletionOutput).trace == Trace(cached_tokens=4)
    feed(made, (10, 12), DRAFTS)
    feed(made, (10, 11, 13), DRAFTS)
    first = Round(1, 2, (10, 11), (-1, 0), (0,))
    second = Round(3, 3, (10, 11), (-1, 0), (0, 1))
    assert made.growth(CompletionOutput).trace == Trace(cached_tokens=4, rounds=(first, second))
    made.finish(FinishReason.ABORT)
    assert made.growth(CompletionOutput).trace.rounds == ()
    assert made.snapshot().trace.rounds == (first, second)


def test_growths_joined_are_the_snapshot():
    made = completion(trace_tokens=True)
    joined = None
    for tokens, drafts in [((9,), None), ((10, 12), DRAFTS), ((13,), DRAFTS), ((5,), None)]:
        feed(made, tokens, drafts)
        growth = made.growth(CompletionOutput)
        joined = growth if joined is None else joined.then(growth)
    assert joined.trace == made.snapshot().trace
    document = joined.as_document()["trace"]
    assert document["is_drafted"] == [False, True, False, False, False]
    assert [each["at"] for each in document["rounds"]] == [1, 3]
    assert document["rounds"][0]["taken"] == [0]


def test_a_round_that_emitted_nothing_is_none():
    made = completion(trace_tokens=True)
    feed(made, (9,))
    made.apply(RequestUpdate(made.request, (), (), FinishReason.ERROR, (), 0, DRAFTS))
    assert made.snapshot().trace.rounds == ()


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_who_does_not_ask_is_told_nothing(drafts):
    made = completion()
    feed(made, (10, 12), drafts)
    assert made.growth(CompletionOutput).trace is None
    assert "trace" not in made.snapshot().as_document()
