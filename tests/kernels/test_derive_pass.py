"""derive_rows over a pass: worked examples, a pass counted by hand, and the same from the table."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pass_cases import MAX_PAGES, Base, PassShape, make_base, make_view
from step_cases import RUBBISH, fields_of, told

from paceline.core.errors import KernelArgumentError
from paceline.core.padding import PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._triton.derive_pass import launch_derive_pass
from paceline.kernels.derive import (
    _DERIVE_PASS,
    PassRows,
    TableRows,
    _derive_pass_cuda,
    _derived,
    _groups,
    derive_rows,
)
from paceline.kernels.derive_tree import derive_tree
from paceline.kernels.step_view import StepView
from paceline.runner.recording.recorded import RecordedGraph

SHAPES = [
    PassShape(1, 1, is_tree=False),
    PassShape(4, 1, is_tree=False, advance=3),
    PassShape(3, 5, is_tree=False, advance=1, page_sizes=(1, 16)),
    PassShape(3, 1, is_tree=True),
    PassShape(4, 6, is_tree=True, page_sizes=(4, 1)),
    PassShape(2, 17, is_tree=True, advance=2, page_sizes=(5, 1, 16)),
]
CASES = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.reqs}-{s.rows}-{s.is_tree}")


def by_operation(shape: PassShape, source: PassRows, view: StepView) -> None:
    offsets = torch.arange(shape.reqs * shape.rows, dtype=torch.int32)
    derive_rows(source, view, page_sizes=shape.page_sizes, offsets=offsets)


def by_triton(shape: PassShape, source: PassRows, view: StepView) -> None:
    groups = [*zip(*_groups(view), shape.page_sizes, strict=True)]
    launch_derive_pass(source, _derived(view), groups, tree_mask=view.tree_mask)


Derive = Callable[[PassShape, PassRows, StepView], None]
RUNS = pytest.mark.parametrize("derive_pass", [by_operation, by_triton], ids=["op", "triton"])


def ancestors(parents: Sequence[int], row: int) -> list[int]:
    """The row and those above it."""
    found = [row]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def counted(shape: PassShape, base: Base) -> dict[str, list[object]]:
    """Every field of the pass, one number at a time; row ids, page tables and inputs stay."""
    source, fields = base.source, {}
    for name in ("prefix_lens", "extend_lens", "kv_lens", "logits_loc", "req_ids", "positions"):
        fields[name] = []
    fields |= {f"out_cache_loc.{group}": [] for group in range(len(shape.page_sizes))}
    fields |= {f"page_table.{i}": table.tolist() for i, table in enumerate(base.page_tables)}
    fields["cu_seqlens_q"] = [0]
    fields["row_ids"] = base.row_ids.tolist()
    fields["input_ids"] = [RUBBISH] * (shape.reqs * shape.rows)
    if shape.is_tree:
        fields["tree_mask"] = []
    for req, row_id in enumerate(base.row_ids.tolist()):
        is_live = row_id != PAD_ROW
        prefix = int(source.committed[req]) + shape.advance if is_live else 1
        fields["prefix_lens"].append(prefix)
        fields["extend_lens"].append(shape.rows)
        fields["kv_lens"].append(prefix + shape.rows)
        fields["cu_seqlens_q"].append((req + 1) * shape.rows)
        fields["logits_loc"].append((req + 1) * shape.rows - 1)
        for row in range(shape.rows):
            place, depth = prefix + row, row
            if source.parents is not None:
                seen = ancestors(source.parents[req].tolist(), row)
                depth = len(seen) - 1
                fields["tree_mask"].append([column in seen for column in range(shape.rows)])
            fields["req_ids"].append(req)
            fields["positions"].append(prefix + depth)
            for group, (table, size) in enumerate(
                zip(base.page_tables, shape.page_sizes, strict=True)
            ):
                page = int(table[req, place // size])
                slot = page * size + place % size if is_live else 0
                fields[f"out_cache_loc.{group}"].append(slot)
    return fields


def assert_counted(view: StepView, wanted: dict[str, list[object]]) -> None:
    assert {name: tensor.tolist() for name, tensor in fields_of(view).items()} == wanted


def run(derive_pass: Derive, shape: PassShape, base: Base) -> StepView:
    view = make_view(shape, base)
    derive_pass(shape, base.source, view)
    return view


@RUNS
def test_the_worked_example_is_as_stated(derive_pass: Derive) -> None:
    base = Base(
        row_ids=torch.tensor([4]),
        page_tables=[torch.tensor([[7, 2, 5]]).int()],
        source=PassRows(torch.tensor([6]).int(), 0, torch.tensor([[-1, -1, 0]]).int()),
    )
    view = run(derive_pass, PassShape(1, 3, is_tree=True), base)
    assert view.prefix_lens.tolist() == [6]
    assert view.kv_lens.tolist() == [9]
    assert view.positions.tolist() == [6, 6, 7]
    assert view.groups[0].out_cache_loc.tolist() == [10, 11, 20]
    assert view.tree_mask is not None
    assert view.tree_mask.int().tolist() == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]


@RUNS
def test_the_second_pass_of_a_chain_stands_behind_what_the_first_wrote(derive_pass: Derive) -> None:
    base = Base(
        row_ids=torch.tensor([4, 0]),
        page_tables=[torch.tensor([[7, 2, 5], [0, 0, 0]]).int()],
        source=PassRows(torch.tensor([7, 1]).int(), 1, None),
    )
    view = run(derive_pass, PassShape(2, 1, is_tree=False), base)
    assert view.positions.tolist() == view.prefix_lens.tolist() == [8, 1]
    assert view.kv_lens.tolist() == [9, 2]
    assert view.groups[0].out_cache_loc.tolist() == [20, 0]


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
            assert_counted(run(by_operation, shape, base), counted(shape, base))


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_pass_is_what_the_table_and_derive_tree_make_of_the_same_requests(is_tree: bool) -> None:
    """The step of the target over as many rows: one rule for both."""
    shape = PassShape(4, 6, is_tree=is_tree, page_sizes=(4, 16))
    base = make_base(shape, seed=2)
    rows, table_rows = base.row_ids.tolist(), 30
    committed = torch.full((table_rows,), 1, dtype=torch.int32)
    committed[base.row_ids] = base.source.committed
    tables = [torch.zeros(table_rows, MAX_PAGES, dtype=torch.int32) for _ in shape.page_sizes]
    for whole, table in zip(tables, base.page_tables, strict=True):
        whole[base.row_ids] = table
    drafted = run(by_operation, shape, base)
    own = Base(
        row_ids=torch.zeros_like(base.row_ids),
        page_tables=[torch.zeros_like(table) for table in base.page_tables],
        source=base.source,
    )
    step = make_view(shape, own)
    step.cu_seqlens_q[0] = 0
    table = TableRows(
        torch.tensor([[row, shape.rows, 0] for row in rows], dtype=torch.int32),
        committed,
        torch.full((table_rows,), int(FinishCode.RUNNING), dtype=torch.int32),
        torch.full((table_rows, 100), RUBBISH, dtype=torch.int32),
        tables,
    )
    offsets = torch.arange(shape.reqs * shape.rows, dtype=torch.int32)
    derive_rows(table, step, page_sizes=shape.page_sizes, offsets=offsets)
    if base.source.parents is not None and step.tree_mask is not None:
        derive_tree(base.source.parents.view(-1), step)
    mine, theirs = fields_of(drafted), fields_of(step)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_the_kernel_writes_nothing_behind_its_rows() -> None:
    shape = PassShape(2, 3, is_tree=True)
    base = make_base(shape, seed=0)
    view = make_view(shape, base)
    wide = {name: torch.full((9,), RUBBISH) for name in ("positions", "req_ids", "loc")}
    mask = torch.ones(6 * 3 + 4, dtype=torch.bool)
    group = replace(view.groups[0], out_cache_loc=wide["loc"][:6])
    view = replace(
        view,
        positions=wide["positions"][:6],
        req_ids=wide["req_ids"][:6],
        groups=(group,),
        tree_mask=mask[:-4].view(6, 3),
    )
    by_triton(shape, base.source, view)
    assert_counted(view, counted(shape, base))
    assert all((tensor[6:] == RUBBISH).all() for tensor in wide.values())
    assert mask[-4:].all()


@pytest.mark.parametrize("is_tree", [False, True])
def test_the_operator_hands_every_argument_to_the_kernel(is_tree: bool) -> None:
    shape = PassShape(2, 3, is_tree=is_tree, advance=2, page_sizes=(4, 1))
    base = make_base(shape, seed=3)
    view = make_view(shape, base)
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("derive_pass", _derive_pass_cuda, "CPU")
        _DERIVE_PASS(
            *base.source, *_derived(view), view.tree_mask, *_groups(view), shape.page_sizes
        )
    assert_counted(view, counted(shape, base))


@pytest.mark.parametrize("is_tree", [False, True])
def test_the_operator_is_told_everything_by_its_name(
    monkeypatch: pytest.MonkeyPatch, is_tree: bool
) -> None:
    shape = PassShape(2, 3, is_tree=is_tree, advance=2, page_sizes=(4, 1))
    base = make_base(shape, seed=3)
    told(monkeypatch, "_DERIVE_PASS", base.source, make_view(shape, base))


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_replay_derives_from_what_it_finds(is_tree: bool) -> None:
    shape = PassShape(3, 4, is_tree=is_tree, advance=1, page_sizes=(4, 1))
    base, other = make_base(shape, seed=1), make_base(shape, seed=2)
    view = make_view(shape, base)
    offsets = torch.arange(shape.reqs * shape.rows, dtype=torch.int32)
    graph = RecordedGraph(poison=True)
    graph.capture(
        lambda: derive_rows(base.source, view, page_sizes=shape.page_sizes, offsets=offsets)
    )
    base.row_ids.copy_(other.row_ids)
    base.source.committed.copy_(other.source.committed)
    for mine, theirs in zip(base.page_tables, other.page_tables, strict=True):
        mine.copy_(theirs)
    if base.source.parents is not None and other.source.parents is not None:
        base.source.parents.copy_(other.source.parents)
    graph.replay()
    assert_counted(view, counted(shape, other))


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    shape = PassShape(2, 3, is_tree=True)
    base = make_base(shape, seed=0)
    view = make_view(shape, base)

    def refused(text: str, source: PassRows = base.source, view: StepView = view) -> None:
        with pytest.raises(KernelArgumentError, match=text):
            by_operation(shape, source, view)

    refused(
        r"parents must be contiguous torch.int32 \[2, 3\], got None",
        base.source._replace(parents=None),
    )
    refused(r"tree_mask must be .*\[6, 3\], got None", view=replace(view, tree_mask=None))
    refused(
        r"req_ids must be .*\[6\], got int64 \[5\]", view=replace(view, req_ids=view.req_ids[1:])
    )
    refused(
        r"cu_seqlens_q must be .*\[3\], got .*; every request of a pass brings as many rows",
        view=replace(view, cu_seqlens_q=view.cu_seqlens_q[1:]),
    )
    group = replace(view.groups[0], out_cache_loc=view.groups[0].out_cache_loc.int())
    refused(r"out_cache_locs\[0\] must be .*int64", view=replace(view, groups=(group,)))
