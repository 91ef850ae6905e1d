"""The suite of cases: each is well formed, and together they cover the axes."""

import itertools
from collections import Counter

import pytest

from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.proof.oracle.methods.softmax import visible_keys
from paceline.proof.rig.placement import place
from paceline.proof.suite.case import PageLayout
from paceline.proof.suite.cases import cases
from paceline.proof.suite.modes import ExtendShape, ForwardMode

CASES = cases()
QUICK = [case for case in CASES if case.is_quick]
UNIFORM = [case for case in CASES if case.mode.facts.extend is not ExtendShape.RAGGED]
RAGGED = [case for case in CASES if case.mode.facts.extend is ExtendShape.RAGGED]
MODES = {
    ForwardMode.EXTEND,
    ForwardMode.DECODE,
    ForwardMode.MIXED,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_DECODE,
    ForwardMode.DRAFT_EXTEND,
    ForwardMode.DRAFT_EXTEND_V2,
}


def title(case):
    return f"{case.method}/{case.mode.value}/{case.name}"


def which(condition, among=CASES):
    """Titles of the cases that meet a condition."""
    return [title(case) for case in among if condition(case)]


def test_titles_are_unique():
    assert [name for name, count in Counter(map(title, CASES)).items() if count > 1] == []


def test_titles_are_safe_in_ids():
    assert which(lambda case: not case.name.replace("-", "").replace("_", "").isalnum()) == []


def test_method_says_whether_a_layer_has_a_window_or_chunks():
    def method(case):
        kinds = {type(layer.window) for layer in case.layers}
        return "chunk" if Chunk in kinds else "swa" if int in kinds else None

    ours = [case for case in CASES if case.method != "embed"]
    named = ("swa", "chunk")
    assert (
        which(lambda case: (case.method if case.method in named else None) != method(case), ours)
        == []
    )


def test_every_case_replays_its_step_twice():
    assert which(lambda case: len(case.batches) < 3) == []


def test_replays_have_other_lengths():
    assert which(lambda case: len({batch.kv_lens for batch in case.batches}) < 3) == []


def test_replays_shrink_and_grow():
    def moves(case):
        longest = [max(batch.kv_lens) for batch in case.batches]
        pairs = tuple(itertools.pairwise(longest))
        return any(b > a for a, b in pairs) and any(b < a for a, b in pairs)

    assert which(lambda case: not moves(case)) == []


def test_some_replay_has_a_longer_request_than_the_capture():
    def grows(case):
        return case.max_kv_len > max(case.batches[0].kv_lens)

    assert which(lambda case: not grows(case)) == []


def test_some_replay_has_fewer_rows_than_were_captured():
    fixed = which(lambda case: case.name.endswith("-real") or case.captured_reqs == 1)
    assert set(
        which(lambda case: min(b.num_reqs for b in case.batches) == case.captured_reqs)
    ) <= set(fixed)


def test_uniform_requests_bring_one_number_of_tokens_in_every_batch():
    def is_uniform(case):
        return len({extend for batch in case.batches for extend in batch.extend_lens}) == 1

    assert which(lambda case: not is_uniform(case), UNIFORM) == []


def test_uniform_batches_fit():
    def fits(case):
        return all(1 <= batch.num_reqs <= case.captured_reqs for batch in case.batches)

    assert which(lambda case: not fits(case), UNIFORM) == []


def test_ragged_batches_fit_and_leave_a_row_for_what_is_left_over():
    def fits(case):
        left = [case.captured_tokens - batch.num_tokens for batch in case.batches]
        rows = [batch.num_reqs + (n > 0) for batch, n in zip(case.batches, left, strict=True)]
        return min(left) >= 0 and max(rows) <= case.captured_reqs

    assert which(lambda case: not fits(case), RAGGED) == []


def test_lengths_are_of_a_cache():
    for case in CASES:
        for batch in case.batches:
            assert all(extend >= 1 for extend in batch.extend_lens)
            is_ragged = case.mode.facts.extend is ExtendShape.RAGGED
            least = 0 if is_ragged or case.prefix_only else 1
            assert all(prefix >= least for prefix in batch.prefix_lens), title(case)


def test_trees_fit_their_requests():
    for case in CASES:
        for batch in case.batches:
            for parents, extend in zip(batch.parents or (), batch.extend_lens, strict=False):
                assert len(parents) == extend, title(case)
                assert all(-1 <= parent < row for row, parent in enumerate(parents))


def test_a_case_is_a_tree_in_every_batch_or_in_none():
    assert which(lambda case: len({case.mask(batch) for batch in case.batches}) > 1) == []


def test_trees_are_of_modes_that_have_them():
    trees = [case for case in CASES if any(batch.parents for batch in case.batches)]
    assert {case.mode.facts.mask for case in trees} == {MaskKind.TREE}


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE])
def test_some_replay_changes_the_trees(mode):
    def changes(case):
        seen = {batch.parents[0] for batch in case.batches if batch.parents}
        return case.mode is mode and len(seen) > 1

    assert which(changes)


def test_blocks_lie_within_the_tokens_of_their_step_apart_and_ascending():
    with_blocks = [batch for case in CASES for batch in case.batches if batch.blocks is not None]
    assert with_blocks
    for batch in with_blocks:
        places = zip(batch.blocks, batch.prefix_lens, batch.kv_lens, strict=True)
        for spans, prefix, kv_len in places:
            bounds = [bound for span in spans for bound in span]
            assert sorted(bounds) == bounds
            assert all(prefix <= bound <= kv_len for bound in bounds)


def test_blocks_are_of_prompts_and_change_from_replay_to_replay():
    seen = [case for case in CASES if any(batch.blocks for batch in case.batches)]
    assert {case.mode for case in seen} == {ForwardMode.EXTEND, ForwardMode.MIXED}
    assert {case.method for case in seen if case.is_quick} == {"dense", "swa", "mla"}
    offsets = [
        {
            tuple(
                tuple((start - prefix, stop - prefix) for start, stop in spans)
                for spans, prefix in zip(batch.blocks, batch.prefix_lens, strict=True)
            )
            for batch in case.batches
        }
        for case in seen
    ]
    assert all(len(each) == 3 for each in offsets)


def test_query_heads_are_a_multiple_of_kv_heads():
    assert which(lambda case: case.num_heads % case.num_kv_heads != 0) == []


def test_a_request_of_an_interleaved_layout_has_another_beside_it():
    interleaved = [case for case in CASES if case.layout is PageLayout.INTERLEAVED]
    assert which(lambda case: min(b.num_reqs for b in case.batches) < 2, interleaved) == []


def test_requests_of_a_shared_prefix_share_a_page_at_capture():
    shared = [case for case in CASES if case.layout is PageLayout.SHARED_PREFIX]

    def shares(case):
        first = case.batches[0].prefix_lens
        return sum(prefix >= case.page_size for prefix in first) >= 2

    assert which(lambda case: not shares(case), shared) == []


def test_quick_cases_are_few_and_short():
    assert 60 <= len(QUICK) <= 140
    assert which(lambda case: case.max_kv_len > 260 and case.num_heads > 2, QUICK) == []
    assert which(lambda case: case.max_kv_len > 650, QUICK) == []


def test_interpreted_cases_are_tiny():
    tiny = [case for case in CASES if case.is_interpreted]
    assert 12 <= len(tiny) <= 28
    assert which(lambda case: case.max_kv_len > 40 or case.captured_reqs > 4, tiny) == []
    assert which(lambda case: case.dtype == "bfloat16", tiny) == []


def test_all_cases_are_bounded():
    assert 300 <= len(CASES) <= 508


@pytest.mark.parametrize("among", [QUICK, [case for case in CASES if case.is_interpreted]])
def test_every_mode_has_dense_and_windowed_cases(among):
    assert {case.mode for case in among} == MODES
    assert {case.method for case in among} >= {"dense", "swa"}


def test_quick_cases_reach_every_mode_with_a_window():
    assert {case.mode for case in QUICK if case.method == "swa"} == MODES


def test_quick_cases_read_values_out_of_keys_in_chains_and_trees():
    latent = [case for case in QUICK if case.v_in_k]
    assert {case.method for case in latent} == {"mla"}
    trees = [case for case in latent if any(batch.parents for batch in case.batches)]
    assert trees
    assert {ForwardMode.DECODE, ForwardMode.EXTEND} <= {case.mode for case in latent}


def test_quick_cases_reach_every_option():
    assert {case.layout for case in QUICK} == set(PageLayout)
    assert {case.dtype for case in QUICK} == {"bfloat16", "float16", "float32"}
    assert {1, 16, 32, 64, 128} <= {case.page_size for case in QUICK}
    assert any(case.kv_dtype for case in QUICK)
    assert any(case.soft_cap for case in QUICK)
    assert any(case.prefix_only for case in QUICK)
    assert any(case.sinks and any(batch.parents for batch in case.batches) for case in QUICK)
    assert any(len({layer.window for layer in case.layers}) > 2 for case in QUICK)


def test_quick_cases_hold_what_only_long_runs_held():
    assert any(case.prefix_only and case.sinks for case in QUICK)
    assert any(case.v_head_dim != case.head_dim for case in QUICK)
    assert any(case.max_kv_len > 512 for case in QUICK)


@pytest.mark.parametrize(
    ("among", "requests", "tokens"), [(QUICK, 32, 64), (CASES, 128, 128)], ids=["quick", "all"]
)
def test_some_cases_are_larger_than_a_block_of_a_kernel(among, requests, tokens):
    """Behind a block of requests, a tile of rows, a word of a tree's mask, a tile of heads."""
    dense = [case for case in among if case.method == "dense"]
    mixed = [case for case in dense if case.mode is ForwardMode.MIXED]
    trees = [case for case in dense if any(batch.parents for batch in case.batches)]
    assert which(lambda case: case.captured_reqs > requests, dense)
    assert which(lambda case: case.captured_reqs > requests // 2, mixed)
    assert which(lambda case: case.max_extend_len > tokens, mixed)
    assert which(lambda case: case.max_extend_len > tokens // 2, trees)
    assert which(lambda case: case.num_heads // case.num_kv_heads > 16, dense)


def test_some_steps_go_on_in_the_same_layout():
    steady = [case for case in QUICK if any(batch.goes_on for batch in case.batches)]
    assert {case.mode for case in steady} == {ForwardMode.DECODE}
    for case in steady:
        places = [place(case, index) for index in range(len(case.batches))]
        for index, batch in enumerate(case.batches):
            assert (index > 0 and places[index].rows == places[index - 1].rows) == batch.goes_on
            assert not batch.goes_on or batch.extend_lens == case.batches[index - 1].extend_lens


def test_some_rows_see_nothing_of_the_prefix():
    def has_none(case, layer):
        return case.prefix_only and any(
            not visible_keys(case, batch, layer, request, extend - 1)
            for batch in case.batches
            for request, extend in enumerate(batch.extend_lens)
        )

    found = [case for case in QUICK if any(has_none(case, n) for n in range(len(case.layers)))]
    assert {case.method for case in found} == {"dense"}


def test_quick_cases_have_two_layers_with_sinks_and_with_cache_scales_of_their_own():
    assert which(lambda case: case.sinks and len(case.layers) > 1, QUICK)
    assert which(lambda case: case.kv_dtype is not None and len(case.layers) > 1, QUICK)


def test_all_cases_reach_every_axis():
    assert {1, 16, 32, 64, 128, 256} == {case.page_size for case in CASES} - {4}
    dims = {(case.head_dim, case.v_head_dim) for case in CASES}
    assert {(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)} <= dims
    groups = {case.num_heads // case.num_kv_heads for case in CASES}
    assert {1, 2, 4, 7, 8} <= groups
    assert {"1k", "8k", "64k"} <= {part for case in CASES for part in case.name.split("-")}


@pytest.mark.parametrize("mode", sorted(MODES, key=lambda mode: mode.value), ids=lambda m: m.value)
def test_every_mode_has_every_page_size_and_layout(mode):
    mine = [case for case in CASES if case.mode is mode]
    assert {1, 16, 32, 64, 128, 256} <= {case.page_size for case in mine}
    assert {case.layout for case in mine} >= set(PageLayout) - {PageLayout.CONTIGUOUS}


def test_prefix_only_steps_are_drafts():
    frozen = [case for case in CASES if case.prefix_only]
    assert {case.mode for case in frozen} == {ForwardMode.DRAFT_DECODE}
    assert all(batch.parents is None for case in frozen for batch in case.batches)


def test_windows_lie_below_at_and_above_a_page():
    windows = {layer.window for case in CASES for layer in case.layers if case.page_size == 16}
    assert {1, 12, 16, 20, 33} <= windows
