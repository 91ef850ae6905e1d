"""derive_draft: worked examples, a pass counted by hand, and derive with derive_tree beside it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from step_cases import RUBBISH

from paceline.core.errors import KernelArgumentError
from paceline.core.padding import PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._triton.derive_draft import launch_derive_draft
from paceline.kernels.derive import DerivedStep, RequestRows, derive
from paceline.kernels.derive_draft import (
    _DERIVE_DRAFT,
    DraftBase,
    DraftRows,
    _derive_draft_cuda,
    derive_draft,
)
from paceline.kernels.derive_tree import derive_tree
from paceline.runner.recorded import RecordedGraph

Derive = Callable[..., None]
RUNS = pytest.mark.parametrize(
    "derive_pass", [derive_draft, launch_derive_draft], ids=["op", "triton"]
)
MAX_PAGES = 40


@dataclass(frozen=True)
class PassShape:
    """A pass over so many requests, the last of which is padded."""

    reqs: int
    rows: int
    is_tree: bool
    advance: int = 0
    page_sizes: tuple[int, ...] = (4,)


SHAPES = [
    PassShape(1, 1, is_tree=False),
    PassShape(4, 1, is_tree=False, advance=3),
    PassShape(3, 5, is_tree=False, advance=1, page_sizes=(1, 16)),
    PassShape(3, 1, is_tree=True),
    PassShape(4, 6, is_tree=True, page_sizes=(4, 1)),
    PassShape(2, 17, is_tree=True, advance=2, page_sizes=(5, 1, 16)),
]
CASES = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.reqs}-{s.rows}-{s.is_tree}")


def make_base(shape: PassShape, *, seed: int) -> DraftBase:
    """Page ids that need 64-bit slots; trees with rows that hang on the prefix."""
    source = random.Random(seed)
    live = shape.reqs - (shape.reqs > 1)
    rows = [*source.sample(range(1, 30), live), *[PAD_ROW] * (shape.reqs - live)]
    tables = torch.randint(
        1, 2**31 - 1, (len(shape.page_sizes), shape.reqs, MAX_PAGES), dtype=torch.int32
    )
    tables[:, live:] = 0
    parents = [[source.randrange(-1, row) for row in range(shape.rows)] for _ in range(shape.reqs)]
    return DraftBase(
        row_ids=torch.tensor(rows),
        prefix_lens=torch.tensor([source.randrange(15) if row else 1 for row in rows]).int(),
        page_tables=list(tables),
        parents=torch.tensor(parents).int() if shape.is_tree else None,
    )


def make_out(shape: PassShape) -> DraftRows:
    def full(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(size, RUBBISH, dtype=dtype)

    reqs, tokens = shape.reqs, shape.reqs * shape.rows
    return DraftRows(
        prefix_lens=full(reqs, dtype=torch.int32),
        extend_lens=full(reqs, dtype=torch.int32),
        kv_lens=full(reqs, dtype=torch.int32),
        cu_seqlens_q=full(reqs + 1, dtype=torch.int32),
        req_ids=full(tokens, dtype=torch.int64),
        positions=full(tokens, dtype=torch.int64),
        logits_loc=full(reqs, dtype=torch.int64),
        out_cache_locs=[full(tokens, dtype=torch.int64) for _ in shape.page_sizes],
        tree_mask=torch.ones(tokens, shape.rows, dtype=torch.bool) if shape.is_tree else None,
    )


def ancestors(parents: Sequence[int], row: int) -> list[int]:
    """The row and those above it."""
    found = [row]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def counted(shape: PassShape, base: DraftBase) -> dict[str, list[object]]:
    """Every field of the pass, one number at a time."""
    fields: dict[str, list[object]] = {name: [] for name in DraftRows._fields}
    fields["cu_seqlens_q"].append(0)
    fields["out_cache_locs"] = [[] for _ in shape.page_sizes]
    for req, row_id in enumerate(base.row_ids.tolist()):
        is_live = row_id != PAD_ROW
        prefix = int(base.prefix_lens[req]) + shape.advance if is_live else 1
        fields["prefix_lens"].append(prefix)
        fields["extend_lens"].append(shape.rows)
        fields["kv_lens"].append(prefix + shape.rows)
        fields["cu_seqlens_q"].append((req + 1) * shape.rows)
        fields["logits_loc"].append((req + 1) * shape.rows - 1)
        for row in range(shape.rows):
            place, depth = prefix + row, row
            if base.parents is not None:
                seen = ancestors(base.parents[req].tolist(), row)
                depth = len(seen) - 1
                fields["tree_mask"].append([column in seen for column in range(shape.rows)])
            fields["req_ids"].append(req)
            fields["positions"].append(prefix + depth)
            for slots, table, size in zip(
                fields["out_cache_locs"], base.page_tables, shape.page_sizes, strict=True
            ):
                assert isinstance(slots, list)
                page = int(table[req, place // size])
                slots.append(page * size + place % size if is_live else 0)
    return fields


def assert_counted(out: DraftRows, wanted: dict[str, list[object]]) -> None:
    for name, field in zip(DraftRows._fields, out, strict=True):
        if isinstance(field, torch.Tensor):
            assert field.tolist() == wanted[name], name
        else:  # no mask, or the slots of every group
            assert [loc.tolist() for loc in field or ()] == wanted[name], name


def run(derive_pass: Derive, shape: PassShape, base: DraftBase) -> DraftRows:
    out = make_out(shape)
    derive_pass(base, out, advance=shape.advance, page_sizes=shape.page_sizes)
    return out


@RUNS
def test_the_worked_example_is_as_stated(derive_pass: Derive) -> None:
    shape = PassShape(1, 3, is_tree=True)
    base = DraftBase(
        row_ids=torch.tensor([4]),
        prefix_lens=torch.tensor([6]).int(),
        page_tables=[torch.tensor([[7, 2, 5]]).int()],
        parents=torch.tensor([[-1, -1, 0]]).int(),
    )
    out = run(derive_pass, shape, base)
    assert out.prefix_lens.tolist() == [6]
    assert out.kv_lens.tolist() == [9]
    assert out.positions.tolist() == [6, 6, 7]
    assert out.out_cache_locs[0].tolist() == [10, 11, 20]
    assert out.tree_mask is not None
    assert out.tree_mask.int().tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]


@RUNS
def test_the_second_pass_of_a_chain_stands_behind_what_the_first_wrote(derive_pass: Derive) -> None:
    shape = PassShape(2, 1, is_tree=False, advance=1)
    base = DraftBase(
        row_ids=torch.tensor([4, 0]),
        prefix_lens=torch.tensor([7, 1]).int(),
        page_tables=[torch.tensor([[7, 2, 5], [0, 0, 0]]).int()],
        parents=None,
    )
    out = run(derive_pass, shape, base)
    assert out.positions.tolist() == out.prefix_lens.tolist() == [8, 1]
    assert out.kv_lens.tolist() == [9, 2]
    assert out.out_cache_locs[0].tolist() == [20, 0]


@RUNS
@CASES
def test_a_pass_is_what_counting_gives(derive_pass: Derive, shape: PassShape) -> None:
    base = make_base(shape, seed=shape.rows)
    assert_counted(run(derive_pass, shape, base), counted(shape, base))


@pytest.mark.parametrize("is_tree", [False, True])
def test_passes_of_every_width_are_what_counting_gives(is_tree: bool) -> None:
    for rows in range(1, 12):
        for seed in range(4):
            shape = PassShape(1 + seed, rows, is_tree=is_tree, advance=seed, page_sizes=(1, 4))
            base = make_base(shape, seed=seed)
            assert_counted(run(derive_draft, shape, base), counted(shape, base))


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_pass_is_what_derive_and_derive_tree_make_of_the_same_requests(is_tree: bool) -> None:
    """The step of the target over as many rows: one rule for both."""
    shape = PassShape(4, 6, is_tree=is_tree, page_sizes=(4, 16))
    base = make_base(shape, seed=2)
    rows, table_rows = base.row_ids.tolist(), 30
    committed = torch.full((table_rows,), 1, dtype=torch.int32)
    committed[base.row_ids] = base.prefix_lens
    tables = [torch.zeros(table_rows, MAX_PAGES, dtype=torch.int32) for _ in shape.page_sizes]
    for whole, table in zip(tables, base.page_tables, strict=True):
        whole[base.row_ids] = table
    out = run(derive_draft, shape, base)
    step = DerivedStep(
        *(torch.zeros_like(base.row_ids), out.prefix_lens.clone(), out.extend_lens.clone()),
        *(out.kv_lens.clone(), torch.zeros_like(out.cu_seqlens_q), out.logits_loc.clone()),
        *(out.req_ids.clone(), out.positions.clone(), torch.zeros_like(out.positions)),
        page_tables=[torch.zeros_like(table) for table in base.page_tables],
        out_cache_locs=[torch.zeros_like(loc) for loc in out.out_cache_locs],
    )
    derive(
        torch.tensor([[row, shape.rows, 0] for row in rows], dtype=torch.int32),
        RequestRows(
            committed,
            torch.full((table_rows,), int(FinishCode.RUNNING), dtype=torch.int32),
            torch.zeros(table_rows, 100, dtype=torch.int32),
            tables,
        ),
        step,
        page_sizes=shape.page_sizes,
        max_extend_len=shape.rows,
        offsets=torch.arange(shape.reqs * shape.rows, dtype=torch.int32),
    )
    if base.parents is not None:
        mask = torch.zeros(shape.reqs * shape.rows, shape.rows, dtype=torch.bool)
        derive_tree(base.parents.view(-1), step.prefix_lens, step.positions, tree_mask=mask)
        assert out.tree_mask is not None
        assert torch.equal(mask, out.tree_mask)
    for name in DraftRows._fields[:7]:
        assert torch.equal(getattr(out, name), getattr(step, name)), name
    assert all(map(torch.equal, out.out_cache_locs, step.out_cache_locs))


def test_the_kernel_writes_nothing_behind_its_rows() -> None:
    shape = PassShape(2, 3, is_tree=True)
    base, out = make_base(shape, seed=0), make_out(shape)
    room = {"positions": out.positions, "req_ids": out.req_ids, "loc": out.out_cache_locs[0]}
    wide = {name: torch.full((9,), RUBBISH) for name in room}
    mask = torch.ones(6 * 3 + 4, dtype=torch.bool)
    out = out._replace(
        positions=wide["positions"][:6],
        req_ids=wide["req_ids"][:6],
        out_cache_locs=[wide["loc"][:6]],
        tree_mask=mask[:-4].view(6, 3),
    )
    launch_derive_draft(base, out, advance=0, page_sizes=(4,))
    assert_counted(out, counted(shape, base))
    assert all((tensor[6:] == RUBBISH).all() for tensor in wide.values())
    assert mask[-4:].all()


@pytest.mark.parametrize("is_tree", [False, True])
def test_the_operator_hands_every_argument_to_the_kernel(is_tree: bool) -> None:
    shape = PassShape(2, 3, is_tree=is_tree, advance=2, page_sizes=(4, 1))
    base, out = make_base(shape, seed=3), make_out(shape)
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("derive_draft", _derive_draft_cuda, "CPU")
        _DERIVE_DRAFT(*base, *out, shape.advance, shape.page_sizes)
    assert_counted(out, counted(shape, base))


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_replay_derives_from_what_it_finds(is_tree: bool) -> None:
    shape = PassShape(3, 4, is_tree=is_tree, advance=1, page_sizes=(4, 1))
    base, other, out = make_base(shape, seed=1), make_base(shape, seed=2), make_out(shape)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: derive_draft(base, out, advance=1, page_sizes=shape.page_sizes))
    base.row_ids.copy_(other.row_ids)
    base.prefix_lens.copy_(other.prefix_lens)
    for mine, theirs in zip(base.page_tables, other.page_tables, strict=True):
        mine.copy_(theirs)
    if base.parents is not None and other.parents is not None:
        base.parents.copy_(other.parents)
    graph.replay()
    assert_counted(out, counted(shape, other))


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    shape = PassShape(2, 3, is_tree=True)
    base, out = make_base(shape, seed=0), make_out(shape)

    def refused(text: str, base: DraftBase = base, out: DraftRows = out) -> None:
        with pytest.raises(KernelArgumentError, match=text):
            derive_draft(base, out, advance=0, page_sizes=(4,))

    refused(
        r"parents must be contiguous torch.int32 \[2, 3\], got None", base._replace(parents=None)
    )
    refused(r"tree_mask must be .*\[6, 3\], got None", out=out._replace(tree_mask=None))
    refused(r"req_ids must be .*\[6\], got int64 \[5\]", out=out._replace(req_ids=out.req_ids[1:]))
    refused(
        r"cu_seqlens_q must be .*\[3\], got .*; every request of a pass brings as many rows",
        out=out._replace(cu_seqlens_q=out.cu_seqlens_q[1:]),
    )
    locs = [loc.int() for loc in out.out_cache_locs]
    refused(r"out_cache_locs\[0\] must be .*int64", out=out._replace(out_cache_locs=locs))
