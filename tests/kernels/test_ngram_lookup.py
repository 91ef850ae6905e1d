"""ngram_lookup: the op and its Triton kernel against a search in plain Python."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import KernelArgumentError
from paceline.kernels._triton.ngram_lookup import Search, launch_ngram_lookup
from paceline.kernels.ngram_lookup import NgramDrafts, ngram_lookup, num_branches
from paceline.runner.recording.recorded import RecordedGraph

MAX_TOKENS = 40
SHAPES = [
    DraftShape(num_steps=3, topk=1, num_draft_tokens=4),
    DraftShape(num_steps=3, topk=2, num_draft_tokens=6),
    DraftShape(num_steps=2, topk=4, num_draft_tokens=8),
    DraftShape(num_steps=4, topk=2, num_draft_tokens=13),
    DraftShape(num_steps=6, topk=8, num_draft_tokens=4),
]
Run = Callable[..., NgramDrafts]


def run_triton(
    history: Tensor, row_ids: Tensor, known: Tensor, *, shape: DraftShape, min_n: int, max_n: int
) -> NgramDrafts:
    """Blocks of 16 tokens, so that short histories have several."""
    size = (len(row_ids), shape.num_draft_tokens)
    parents = None if shape.is_chain else torch.full(size, -9, dtype=torch.int32)
    out = NgramDrafts(torch.full(size, -9), parents)
    search = Search(
        min_n=min_n, max_n=max_n, num_steps=shape.num_steps, branches=num_branches(shape)
    )
    launch_ngram_lookup(history, row_ids, known, out, search=search, block_tokens=16)
    return out


RUNS = pytest.mark.parametrize("run", [ngram_lookup, run_triton], ids=["op", "triton"])


def searched(
    tokens: Sequence[int], shape: DraftShape, *, min_n: int, max_n: int
) -> tuple[list[int], list[int]]:
    """(tokens, parents) of one request: every match sorted, and each chain grown by appending."""
    last = len(tokens) - 1
    matches = []
    for end in range(last):
        fits = [n for n in range(min_n, max_n + 1) if n <= end + 1]
        equal = [n for n in fits if tokens[end + 1 - n : end + 1] == tokens[last + 1 - n :]]
        if equal:
            matches.append((max(equal), end))
    drafts, parents, seen = [tokens[last]], [-1], set()
    for _, end in sorted(matches, reverse=True):
        room = min(shape.num_steps, shape.num_draft_tokens - len(drafts))
        if room == 0 or len(seen) == shape.topk or tokens[end + 1] in seen:
            continue
        seen.add(tokens[end + 1])
        text = list(tokens)
        for step in range(room):
            text.append(text[end + 1 + step])
            parents.append(0 if step == 0 else len(drafts) - 1)
            drafts.append(text[-1])
    missing = shape.num_draft_tokens - len(drafts)
    return drafts + [tokens[last]] * missing, parents + [-1] * missing


def table(histories: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """(history, row_ids, known); rows in reverse, and behind what is known more of the same."""
    rows = torch.full((len(histories) + 1, MAX_TOKENS), 1, dtype=torch.int32)
    for row, tokens in enumerate(reversed(histories), start=1):
        rows[row, : len(tokens)] = torch.tensor(tokens)
        rows[row, len(tokens) :] = tokens[-1]
    row_ids = torch.arange(len(histories), 0, -1)
    return rows, row_ids, torch.tensor([len(t) for t in histories], dtype=torch.int32)


def assert_found(found: NgramDrafts, wanted: list[tuple[list[int], list[int]]]) -> None:
    assert found.tokens.dtype == torch.int64
    assert found.tokens.tolist() == [tokens for tokens, _ in wanted]
    if found.parents is not None:
        assert found.parents.dtype == torch.int32
        assert found.parents.tolist() == [parents for _, parents in wanted]


def check(
    run: Run, histories: list[list[int]], shape: DraftShape, *, min_n: int, max_n: int
) -> None:
    found = run(*table(histories), shape=shape, min_n=min_n, max_n=max_n)
    assert (found.parents is None) == shape.is_chain
    assert_found(found, [searched(t, shape, min_n=min_n, max_n=max_n) for t in histories])


HISTORIES = st.lists(
    st.integers(2, 3).flatmap(
        lambda vocab: st.lists(st.integers(0, vocab), min_size=1, max_size=MAX_TOKENS)
    ),
    min_size=1,
    max_size=3,
)
SPANS = st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 5)))


@settings(max_examples=150, deadline=None)
@given(histories=HISTORIES, shape=st.sampled_from(SHAPES), span=SPANS)
def test_drafts_follow_the_longest_and_most_recent_matches(
    histories: list[list[int]], shape: DraftShape, span: tuple[int, int]
) -> None:
    check(ngram_lookup, histories, shape, min_n=span[0], max_n=span[1])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_steps}-{s.topk}")
def test_the_kernel_finds_them_too(shape: DraftShape) -> None:
    generator = torch.Generator().manual_seed(shape.num_draft_tokens)
    lengths = (1, 2, 16, 17, 33, MAX_TOKENS)
    histories = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in lengths]
    check(run_triton, histories, shape, min_n=1, max_n=3)
    check(run_triton, histories, shape, min_n=2, max_n=5)


@RUNS
def test_the_worked_example_holds(run: Run) -> None:
    inputs = table([[ord(letter) for letter in "abcxabdab"]])
    chain = run(*inputs, shape=SHAPES[0], min_n=1, max_n=3)
    assert "".join(map(chr, chain.tokens[0].tolist())) == "bdab"
    tree = run(*inputs, shape=SHAPES[1], min_n=1, max_n=3)
    assert "".join(map(chr, tree.tokens[0].tolist())) == "bdabcx"
    assert tree.parents is not None
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 0, 4]]


@RUNS
@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_loop_is_drafted_to_full_depth(run: Run, period: int) -> None:
    tokens = [step % period for step in range(12)]
    found = run(*table([tokens]), shape=SHAPES[0], min_n=2, max_n=4)
    assert found.tokens[0].tolist() == [step % period for step in range(11, 15)]


@RUNS
def test_without_a_match_rows_repeat_the_root_and_hang_nowhere(run: Run) -> None:
    inputs = table([[5], [5, 6, 7], [5, 6, 5, 6]])
    chain = run(*inputs, shape=SHAPES[0], min_n=1, max_n=3)
    assert chain.tokens[:2].tolist() == [[5] * 4, [7] * 4]
    tree = run(*inputs, shape=SHAPES[2], min_n=3, max_n=3)
    assert tree.parents is not None
    assert (tree.parents == -1).all()


def test_a_lookup_replays_on_a_longer_history() -> None:
    (history, row_ids, known), kept = table([[1, 2, 3, 1, 2, 3, 2]]), []
    graph = RecordedGraph(poison=True)
    known.fill_(5)
    graph.capture(
        lambda: kept.append(
            ngram_lookup(history, row_ids, known, shape=SHAPES[1], min_n=1, max_n=3)
        )
    )
    known.fill_(7)
    graph.replay()
    wanted = searched([1, 2, 3, 1, 2, 3, 2], SHAPES[1], min_n=1, max_n=3)
    assert_found(kept[0], [wanted])


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    history, row_ids, known = table([[1, 2]])
    with pytest.raises(KernelArgumentError, match=r"history must be int32 \[table rows, max_tok"):
        ngram_lookup(history.long(), row_ids, known, shape=SHAPES[0], min_n=1, max_n=2)
    with pytest.raises(KernelArgumentError, match=r"known must be int32 or int64 \[1\], one per"):
        ngram_lookup(history, row_ids, known.float(), shape=SHAPES[0], min_n=1, max_n=2)
    for min_n in (0, 3):
        with pytest.raises(KernelArgumentError, match=rf"min_n must be 1 to max_n.* got {min_n}"):
            ngram_lookup(history, row_ids, known, shape=SHAPES[0], min_n=min_n, max_n=2)
