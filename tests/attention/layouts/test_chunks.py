"""Virtual requests are cut where a walk over a step's tokens cuts, and are what layers with chunks
mean to kernels that know none."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import flashinfer_cases
import pytest
import torch
from attention_cases import Case, build, walk
from attention_runs import difference, limits
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fa_backends import check as check_flash_attention

from paceline.attention.backends.fa3_backend import FlashAttention3Backend
from paceline.attention.backends.fa4_backend import FlashAttention4Backend
from paceline.attention.backends.flashinfer_backend import FlashInferBackend
from paceline.attention.cascade import cascade
from paceline.attention.contract import Limits, Part
from paceline.attention.layouts.chunks import (
    chunk_limits,
    cut_lens,
    most_virtual,
    virtual_requests,
)
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView
from paceline.proof.emulators import flash_attn, flashinfer

PAGE = 2
BUILT = build(Case(window=Chunk(4), page_size=PAGE, prefix_lens=(3, 8), extend_lens=(3, 1)))
COLUMNS = 40  # of a page table whose entries are 100 * request + column


def view_of(prefixes: list[int], extends: list[int]) -> StepView:
    """The parts of a step that chunks are cut by."""
    owners = [r for r, extend in enumerate(extends) for _ in range(extend)]
    positions = [p + i for p, e in zip(prefixes, extends, strict=True) for i in range(e)]
    table = 100 * torch.arange(len(prefixes)).unsqueeze(1) + torch.arange(COLUMNS)
    [group] = BUILT.view.groups
    return replace(
        BUILT.view,
        row_ids=torch.arange(len(prefixes)),
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_lens=torch.tensor(extends, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *extends]).cumsum(0).int(),
        req_ids=torch.tensor(owners),
        positions=torch.tensor(positions),
        groups=(replace(group, page_table=table.int()),),
        max_extend_len=max(extends),
    )


def in_chunks_of(size: int) -> Limits:
    """Limits of a layer with chunks."""
    spec = replace(BUILT.layer.spec, window=Chunk(size))
    return replace(limits(BUILT, spec), windows=(Chunk(size),), page_size=PAGE)


def test_the_example_of_the_layout() -> None:
    view = replace(
        view_of([3, 8], [3, 1]),
        groups=(
            replace(
                BUILT.view.groups[0],
                page_table=torch.tensor([[7, 2, 5, 0, 0], [4, 1, 8, 6, 3]]).int(),
            ),
        ),
    )
    [cut] = virtual_requests(view, in_chunks_of(4), Part.ALL)
    assert cut.cu_seqlens_q.tolist() == [0, 1, 3, 4, 4]
    assert cut.keys_used.tolist() == [4, 2, 1, 1]
    assert cut.page_table.tolist() == [[7, 2], [5, 0], [3, 3], [3, 3]]
    [whole] = virtual_requests(view, in_chunks_of(4), Part.PREFIX)
    assert whole.cu_seqlens_q is view.cu_seqlens_q
    assert (whole.keys_used.tolist(), whole.page_table.tolist()) == ([3, 1], [[7, 2], [3, 3]])
    assert whole.lacks_prefix.tolist() == [False, True, True, True]
    assert (cut.max_extend_len, whole.max_extend_len) == (3, 3)


def test_there_is_room_for_no_more_than_could_be() -> None:
    """A row of 6 tokens behind 3 lies in three chunks of 4; rows of a token are one each."""
    chunk = Chunk(4)
    assert len(cut_lens([3], [6], chunk)) == most_virtual(1, 6, chunk) == 3
    assert most_virtual(5, 5, chunk) == 5
    most = replace(in_chunks_of(4), max_reqs=3, max_tokens=9)
    groups = {"windows": (None, chunk, Chunk(8), chunk), "max_pages": (7, 7, 7, 1)}
    within = chunk_limits(replace(most, **groups), chunk)
    assert (within.max_reqs, within.max_pages) == (8, (0, 2, 0, 1))
    assert chunk_limits(replace(most, max_tokens=2), chunk).max_reqs == 3  # the prefix alone


ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 13)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS.filter(lambda rows: any(extend for _, extend in rows)), pages=st.integers(1, 4))
def test_every_token_is_where_its_chunk_is(rows: list[tuple[int, int]], pages: int) -> None:
    """By host and device alike; as many as there is room for, whatever the rows."""
    chunk = Chunk(pages * PAGE)
    prefixes, extends = [list(each) for each in zip(*rows, strict=True)]
    view = view_of(prefixes, extends)
    [cut] = virtual_requests(view, in_chunks_of(chunk.size), Part.ALL)
    starts, used = cut.cu_seqlens_q.tolist(), cut.keys_used.tolist()
    room = most_virtual(len(rows), sum(extends), chunk)
    assert (len(used), starts[0], starts[-1]) == (room, 0, sum(extends))
    cuts = [(e - s, used[i]) for i, (s, e) in enumerate(pairwise(starts)) if e > s]
    assert cut_lens(prefixes, extends, chunk) == cuts + [(0, 0)] * (room - len(cuts))
    assert max(tokens for tokens, _ in cuts) <= cut.max_extend_len
    for number, (start, end) in enumerate(pairwise(starts)):
        for token in range(start, end):
            request, position = int(view.req_ids[token]), int(view.positions[token])
            first = position // chunk.size * chunk.size
            # Aligned at the end, the row's last key is its own; the first is the chunk's.
            assert used[number] - (end - 1 - token) == position - first + 1
            columns = [first // PAGE + column for column in range(pages)]
            assert cut.page_table[number].tolist() == [100 * request + each for each in columns]
            assert bool(cut.lacks_prefix[token]) == (first >= prefixes[request])


CHUNKS = Case(dtype=torch.bfloat16, window=Chunk(6), page_size=3, prefix_lens=(0, 7, 17))
STEPS = {
    "ragged": replace(CHUNKS, extend_lens=(13, 2, 5)),
    "decode": replace(CHUNKS, extend_lens=(1, 1, 1), prefix_lens=(5, 6, 17)),
    "prefix": replace(CHUNKS, extend_lens=(3, 3, 3), part=Part.PREFIX, prefix_lens=(4, 6, 17)),
    "padded": replace(CHUNKS, extend_lens=(2, 2, 2), padded_reqs=2),
    "tree": replace(CHUNKS, extend_lens=(5, 5, 5), mask=MaskKind.TREE, prefix_lens=(5, 6, 16)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("backend_class", [FlashAttention4Backend, FlashAttention3Backend])
def test_flash_attention_sees_chunks(name: str, backend_class: Callable[[Any], Any]) -> None:
    backend = backend_class(flash_attn)
    check_flash_attention(cascade(backend) if name == "tree" else backend, STEPS[name])


@pytest.mark.parametrize("name", STEPS)
def test_flashinfer_sees_chunks(name: str) -> None:
    case = replace(STEPS[name], head_dim=64, v_head_dim=64)
    if name != "tree":
        flashinfer_cases.check(case)
        return
    built = build(case)
    backend = cascade(FlashInferBackend(flashinfer))
    buffers = backend.make_buffers(limits(built))
    backend.host_plan(flashinfer_cases.step_of(built), buffers)
    k, v = built.paged.fresh_rows()
    out, _ = backend.forward(
        built.q, k, v, built.layer, backend.plan(built.view, buffers), Part.ALL
    )
    assert difference(out.double(), walk(built)[0]) < flashinfer_cases.TOLERANCE
