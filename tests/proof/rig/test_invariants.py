"""The invariants: every list of a step, wrong in one entry, is reported by its name."""

from dataclasses import dataclass

import pytest
import torch
from rig_cases import DECODE, EXTEND, TREE, rig_of

from paceline.attention.layouts.csr import CsrPlan, csr_lens
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.core.padding import PAD_PAGE
from paceline.proof.rig.invariants import broken_invariants, differences


@dataclass(frozen=True)
class Nested:
    """A plan that holds layouts as plans do."""

    parts: tuple


@dataclass
class Launched:
    """A rig after its padded batch 1, and the names its step breaks."""

    rig: object
    case: object

    @property
    def view(self):
        return self.rig._watched.planned[0]

    def broken(self, *layouts):
        rig, batch = self.rig, self.case.batches[1]
        rig._watched.planned = (self.view, Nested(layouts) if layouts else None)
        return broken_invariants(
            self.case,
            batch,
            rig._places[1],
            ids=self.ids,
            watched=rig._watched,
            positions=rig._probe.positions,
        )

    def page_table(self):
        return page_table_plan(self.view)

    def csr(self, *, is_prefix=False):
        """CSR lists of group 0, as derived from the host's lengths and the step's page table."""
        batch, view = self.case.batches[1], self.view
        num_pad = view.padded_reqs - batch.num_reqs
        pad = view.max_extend_len
        host = batch.prefix_lens if is_prefix else batch.kv_lens
        lens = csr_lens([*host, *[1 if is_prefix else 1 + pad] * num_pad], self.case.page_size)
        counts = lens.kv_indptr.diff().tolist()
        table = view.groups[0].page_table
        pages = [table[row, :count] for row, count in enumerate(counts)]
        tail = torch.full((3,), PAD_PAGE, dtype=torch.int32)
        return CsrPlan(
            group=0,
            kv_indptr=lens.kv_indptr,
            kv_indices=torch.cat([*pages, tail]),
            last_page_len=lens.last_page_len,
            is_prefix=is_prefix,
        )


def launched(case):
    rig = rig_of(case)
    made = Launched(rig, case)
    made.ids = rig._fill_table(1)
    for index in (0, 1):
        assert rig.launch(index) == []
    return made


@pytest.fixture(scope="module")
def tree():
    return launched(TREE)


@pytest.fixture(scope="module")
def decode():
    return launched(DECODE)


def planted(tensor, run):
    """What `run` says while one entry of a tensor is another: the first, or else the last."""
    for place in (0, -1):
        entries = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
        assert entries.data_ptr() == tensor.data_ptr()
        kept = entries[place].clone()
        entries[place] = not kept if tensor.dtype is torch.bool else kept + 1
        yield run()
        entries[place] = kept
    assert run() == []


VIEW_FIELDS = (
    "row_ids",
    "prefix_lens",
    "extend_lens",
    "kv_lens",
    "cu_seqlens_q",
    "req_ids",
    "positions",
    "input_ids",
    "logits_loc",
    "tree_mask",
)


@pytest.mark.parametrize("name", VIEW_FIELDS)
def test_a_wrong_entry_of_the_view_is_reported_by_name(tree, name):
    for faults in planted(getattr(tree.view, name), tree.broken):
        assert len(faults) == 1
        assert faults[0].startswith(name)
        assert " must be [" in faults[0]


def test_a_wrong_slot_is_reported_by_name(tree):
    for faults in planted(tree.view.groups[0].out_cache_loc, tree.broken):
        assert len(faults) == 1
        assert faults[0].startswith("out_cache_loc of group 0")


def test_a_wrong_page_is_reported_by_row(tree):
    for row in range(tree.view.padded_reqs):
        entry = tree.view.groups[0].page_table[row]
        entry[0] += 1
        faults = tree.broken()
        entry[0] -= 1
        assert len(faults) == 1
        assert faults[0].startswith(f"page table row {row} of group 0")
    assert tree.broken() == []


def test_a_page_behind_a_request_is_nobodys(decode):
    entry = decode.view.groups[0].page_table[0]
    kept = int(entry[-1])
    entry[-1] = 7
    assert decode.broken() == []
    entry[-1] = kept


def test_wrong_positions_in_the_model_are_reported(tree):
    rig = tree.rig
    given = rig._probe.positions[: tree.view.padded_tokens]
    for faults in planted(given, tree.broken):
        assert len(faults) == 1
        assert faults[0].startswith("positions the model was given")


def test_a_tree_without_a_mask_and_a_chain_with_one_are_reported(tree, decode):
    for made, state in ((tree, "present"), (decode, "absent")):
        kept = made.view.tree_mask
        other = None if kept is not None else torch.ones(made.view.padded_tokens, 1)
        object.__setattr__(made.view, "tree_mask", other)
        assert made.broken() == [f"tree_mask must be {state}"]
        object.__setattr__(made.view, "tree_mask", kept)


@pytest.mark.parametrize("name", ["max_extend_len", "kv_len_bound"])
def test_a_bound_below_a_length_is_reported(tree, name):
    kept = getattr(tree.view, name)
    object.__setattr__(tree.view, name, 1)
    # Padded rows extend by max_extend_len: with another, the lengths are what is wrong first.
    assert any(name in fault or "extend_lens" in fault for fault in tree.broken())
    object.__setattr__(tree.view, name, kept)


# --- layouts of a plan ----------------------------------------------------------------------------

TABLE_FIELDS = ("cu_seqlens_q", "prefix_lens", "extend_lens", "kv_lens", "tree_mask")


def other_table(plan, **changed):
    fields = {name: getattr(plan, name) for name in PageTablePlan.__dataclass_fields__}
    return PageTablePlan(**(fields | changed))


@pytest.mark.parametrize("name", TABLE_FIELDS)
def test_a_wrong_entry_of_a_page_table_plan_is_reported(tree, name):
    copied = getattr(tree.page_table(), name).clone()
    plan = other_table(tree.page_table(), **{name: copied})
    for faults in planted(copied, lambda: tree.broken(plan)):
        assert len(faults) == 1
        assert faults[0].startswith(f"plan.parts.0.{name}")


def test_a_wrong_page_of_a_page_table_plan_is_reported(tree):
    table = tree.page_table().page_tables[0].clone()
    table[1, 0] += 1
    faults = tree.broken(other_table(tree.page_table(), page_tables=(table,)))
    assert [fault.split(" must")[0] for fault in faults] == ["page table row 1 plan.parts.0.0"]


def test_page_tables_of_another_dtype_or_stride_are_reported(tree):
    table = tree.page_table().page_tables[0]
    for changed, text in ((table.long(), "int64"), (table.t().contiguous().t(), "with 3")):
        faults = tree.broken(other_table(tree.page_table(), page_tables=(changed,)))
        assert len(faults) == 1
        assert text in faults[0]


@pytest.mark.parametrize("name", ["max_extend_len", "kv_len_bound"])
def test_a_plan_whose_bound_is_too_low_is_reported(tree, name):
    faults = tree.broken(other_table(tree.page_table(), **{name: 1}))
    assert len(faults) == 1
    assert faults[0].startswith(f"plan.parts.0.{name} must be at least")


@pytest.mark.parametrize("is_prefix", [False, True])
@pytest.mark.parametrize("name", ["kv_indptr", "last_page_len", "kv_indices"])
def test_a_wrong_entry_of_csr_lists_is_reported(tree, decode, name, is_prefix):
    for made in (tree, decode):
        lists = made.csr(is_prefix=is_prefix)
        live = int(lists.kv_indptr[-1])
        entries = getattr(lists, name)
        entries = entries[:live] if name == "kv_indices" else entries
        for faults in planted(entries, lambda plan=lists, of=made: of.broken(plan)):
            assert any(fault.startswith(f"plan.parts.0.{name}") for fault in faults)


def test_csr_lists_of_a_frozen_row_have_the_hosts_length_and_page_0(tree):
    assert tree.case.batches[1].frozen == (0,)
    lists = tree.csr()
    used = -(-tree.case.batches[1].kv_lens[0] // tree.case.page_size)
    assert lists.kv_indptr[1] == used
    assert lists.kv_indices[:used].tolist() == [PAD_PAGE] * used
    assert tree.broken(lists) == []


def test_every_layout_of_a_nested_plan_is_checked(tree):
    wrong = other_table(tree.page_table(), max_extend_len=1)
    faults = tree.broken(tree.page_table(), Nested((wrong, tree.csr())))
    assert [fault.split(" ")[0] for fault in faults] == ["plan.parts.1.parts.0.max_extend_len"]


def test_a_ragged_step_with_tokens_left_over_holds(tmp_path):
    made = launched(EXTEND)
    assert made.view.padded_tokens > made.case.batches[1].num_tokens
    assert made.broken(made.page_table()) == []


# --- the text -------------------------------------------------------------------------------------


def test_a_long_list_is_cut_around_its_first_difference():
    wanted = list(range(40))
    got = [*range(20), 99, *range(21, 40)]
    (text,) = differences("name", got, wanted)
    assert text == (
        "name[17:29] must be [17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28], "
        "got [17, 18, 19, 99, 21, 22, 23, 24, 25, 26, 27, 28]"
    )


def test_short_lists_are_shown_whole_and_lengths_told():
    assert list(differences("name", [1, 2], [1, 3])) == ["name must be [1, 3], got [1, 2]"]
    assert list(differences("name", [1], [1, 3])) == ["name must have 2 entries, got 1"]
    assert list(differences("name", [1, 3], [1, 3])) == []
