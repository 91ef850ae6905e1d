"""Faults of the kind that strangers plant: each is found by a cell that says what it looks like."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rig_cases import CASES, Exact, cell

from paceline.attention.contract import Part
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.oracle.inputs import SCALE_FACTOR


class HostPlanned(Exact):
    """Right: attends by the prefixes that it planned on the host."""

    capabilities = replace(Exact.capabilities, host_plan=True)

    def make_buffers(self, limits):
        return SimpleNamespace(lens=torch.zeros(limits.max_reqs, dtype=torch.int32), layout=None)

    def host_plan(self, step, buffers):
        lens = torch.tensor(step.prefix_lens_bound, dtype=torch.int32)
        buffers.lens[: len(lens)].copy_(lens)

    def plan(self, view, buffers):
        return replace(view, prefix_lens=buffers.lens[: view.padded_reqs])


class PlansNewLayouts(HostPlanned):
    """Takes a step whose layout it knows for one that it has planned."""

    def host_plan(self, step, buffers):
        if step.layout != buffers.layout:
            super().host_plan(step, buffers)
        buffers.layout = step.layout


class PlansNewTotals(HostPlanned):
    """Takes a step of as many keys for one that it has planned."""

    def host_plan(self, step, buffers):
        total = step.layout.num_reqs, sum(step.prefix_lens_bound)
        if total != buffers.layout:
            super().host_plan(step, buffers)
        buffers.layout = total


class WindowByRowOfKeys(Exact):
    def key_positions(self, view, layer):
        return torch.arange(super().key_positions(view, layer).shape[1])


class WindowByRowOfQueries(Exact):
    def query_positions(self, view, part):
        start = view.cu_seqlens_q.index_select(0, view.req_ids)
        prefix = view.prefix_lens.index_select(0, view.req_ids)
        return prefix + torch.arange(view.padded_tokens) - start


class WindowFromThePrefixEnd(Exact):
    def query_positions(self, view, part):
        if part is Part.ALL:
            return view.positions
        return view.prefix_lens.index_select(0, view.req_ids)


class WindowOff(Exact):
    off = 0

    def query_positions(self, view, part):
        return view.positions - self.off


class WindowWider(WindowOff):
    off = 1


class WindowNarrower(WindowOff):
    off = -1


class NothingIsZero(Exact):
    """Of no key, the sum of exponentials is 0, and this its logarithm's."""

    def lse(self, lse):
        return lse.clamp(min=0.0)


class NothingIsNaN(Exact):
    def weights(self, scores, total):
        return (scores - total.unsqueeze(2)).exp()


class SharedMaximum(Exact):
    """Subtracts one maximum from the scores of the whole batch."""

    def weights(self, scores, total):
        weights = (scores - scores.max()).exp()
        return weights / weights.sum(2, keepdim=True)


class SinksInThePrefix(Exact):
    def sinks(self, sinks, part):
        return sinks


class NoSinks(Exact):
    def sinks(self, sinks, part):
        return None


class SinksTwice(Exact):
    def sinks(self, sinks, part):
        return sinks + torch.tensor(2.0).log()


class ScaleOfItsOwn(Exact):
    def scale(self, spec):
        return spec.scale / SCALE_FACTOR


class NoScale(Exact):
    def scale(self, spec):
        return 1.0


class ScaleOfV(Exact):
    def scale(self, spec):
        return spec.scale * (spec.head_dim / spec.v_head_dim) ** 0.5


class Striped(Exact):
    def owner(self, spec):
        return torch.arange(spec.num_heads) % spec.num_kv_heads


class NoCap(Exact):
    def capped(self, scores, spec):
        return scores


class CapBeforeScale(Exact):
    def capped(self, scores, spec):
        return super().capped(scores / spec.scale, spec) * spec.scale


class Chain(Exact):
    """Takes every tree for a chain."""

    def plan(self, view, buffers):
        return replace(view, tree_mask=None)


class BaseTwo(Exact):
    def lse(self, lse):
        return lse / torch.tensor(2.0).log()


class SignTurned(Exact):
    def lse(self, lse):
        return -lse


class Forgets(Exact):
    """Has room for the last 512 keys."""

    def seen(self, view, part, layer):
        seen = super().seen(view, part, layer)
        kv_lens = view.kv_lens.index_select(0, view.req_ids).unsqueeze(1)
        return seen & (torch.arange(seen.shape[1]) >= kv_lens - 512)


ROWS3 = "swa/draft_decode/window4-frozen-kv-rows3"
NO_PREFIX = "dense/draft_decode/frozen-kv-no-prefix"
TREE = "swa/target_verify/window2-topk2-deep"
WINDOW = "swa/decode/window12-page-edges"
EDGES = "dense/decode/page-edges"
FAULTS = [
    (PlansNewLayouts, "dense/decode/steady", "looks like: last key dropped"),
    (PlansNewTotals, "dense/decode/steady", "batch 4: "),
    (WindowByRowOfKeys, TREE, "looks like: window by row of keys and depth of queries"),
    (WindowByRowOfQueries, TREE, "looks like: window by depth of keys and row of queries"),
    (WindowFromThePrefixEnd, ROWS3, "looks like: window counted from the prefix's end"),
    (NothingIsZero, NO_PREFIX, "lse inf where 0.00205 is allowed"),
    (NothingIsNaN, NO_PREFIX, "error inf"),
    (SharedMaximum, "dense/decode/uneven", "error inf"),
    (SharedMaximum, "dense/extend/uneven", "error inf"),
    (
        SinksInThePrefix,
        "dense/draft_decode/frozen-kv-sinks",
        "looks like: sinks applied to the prefix alone",
    ),
    (NoSinks, "dense/extend/sinks", "looks like: no sinks"),
    (SinksTwice, "dense/extend/sinks", "looks like: sinks counted twice"),
    (WindowWider, WINDOW, "looks like: window one wider"),
    (WindowNarrower, WINDOW, "looks like: window one narrower"),
    (ScaleOfItsOwn, EDGES, "looks like: head_dim ** -0.5 for the scale"),
    (NoScale, EDGES, "looks like: no scale"),
    (ScaleOfV, "dense/decode/dim128-64", "error "),
    (Striped, EDGES, "looks like: KV heads striped (h % kv_heads)"),
    (NoCap, "dense/extend/soft-cap", "looks like: no soft cap"),
    (Chain, "dense/target_verify/topk4", "looks like: a chain"),
    (BaseTwo, "dense/draft_decode/frozen-kv", "looks like: logarithm to base 2"),
    (SignTurned, "dense/draft_decode/frozen-kv", "looks like: sign turned"),
    (Forgets, "dense/decode/long-600", "error "),
]


@pytest.mark.parametrize(
    ("fault", "case", "text"), FAULTS, ids=[f"{f[0].__name__}-{f[1]}" for f in FAULTS]
)
def test_a_planted_fault_fails_its_quick_cell_and_is_named(fault, case, text):
    assert CASES[case].is_quick
    result = cell(fault, CASES[case], RunnerKind.EAGER)
    assert result.status is Status.FAILING
    assert text in result.reason, result.reason


FOUND = sorted({case for _, case, _ in FAULTS})


@pytest.mark.parametrize("case", FOUND)
def test_the_backend_they_are_planted_in_is_right(case):
    base = HostPlanned if case.endswith("steady") else Exact
    result = cell(base, CASES[case], RunnerKind.EAGER)
    assert result.status is Status.PROVEN, result.reason


def test_a_plan_kept_for_its_layout_is_missed_where_no_layout_comes_twice():
    result = cell(PlansNewLayouts, CASES[EDGES], RunnerKind.EAGER)
    assert result.status is Status.PROVEN, result.reason


def test_an_lse_of_wrong_scores_is_not_named_after_what_it_happens_to_be():
    result = cell(CapBeforeScale, CASES["dense/extend/soft-cap"], RunnerKind.EAGER)
    assert " and lse " in result.reason
    assert "looks like: logarithm" not in result.reason


def test_a_plan_kept_for_its_layout_fails_in_a_graph_too():
    assert cell(PlansNewLayouts, CASES["dense/decode/steady"]).status is Status.FAILING


@pytest.mark.parametrize("case", [NO_PREFIX, ROWS3, TREE, "dense/decode/uneven"])
def test_the_new_cells_replay_one_graph(case):
    result = cell(Exact, CASES[case])
    assert result.status is Status.PROVEN, result.reason
