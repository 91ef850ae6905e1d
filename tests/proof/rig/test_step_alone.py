"""Cells of the step alone, and of layers that look both ways: a planted fault fails its cell and is
named."""

from dataclasses import replace

import pytest
from rig_cases import CASES, cell

from paceline.attention.backends import triton_backend
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.backends.triton_backend import TritonBackend
from paceline.attention.contract import Part
from paceline.attention.paged import attend_cpu
from paceline.attention.step_rows import attend_step
from paceline.kernels.merge_partials import merge_partials
from paceline.kernels.ragged_attention import ragged_attention
from paceline.layers import attention as attention_layer
from paceline.proof.check.cell import RunnerKind, Status

EXTEND, VERIFY = "dense/extend/step-alone", "dense/target_verify/step-alone"
BLOCKS, TREE = "swa/extend/blocks-step-alone", "swa/target_verify/step-alone-tiny"
TINY = "dense/extend/blocks-step-alone-tiny"
TEXTS = "embed/extend/texts"


class Planted(TorchBackend):
    """Right."""

    def forward(self, q, k, v, layer, plan, part):
        assert part is Part.STEP
        return self.attend(q, k, v, layer, plan.table)

    def attend(self, q, k, v, layer, table):
        return attend_step(q, k, v, layer, table)


class ReadsThePool(Planted):
    def attend(self, q, k, v, layer, table):
        return attend_cpu(q, layer, table, Part.ALL, wants_lse=True)


class WritesItsRows(Planted):
    def attend(self, q, k, v, layer, table):
        layer.k_cache[1, 0] = k[0]
        return attend_step(q, k, v, layer, table)


class CountsSinks(Planted):
    def attend(self, q, k, v, layer, table):
        out, lse = attend_step(q, k, v, layer, table)
        nothing = out.new_zeros(out.shape), lse.new_full(lse.shape, -float("inf"))
        merge_partials(out, lse, *nothing, sinks=layer.sinks, out=out, lse=lse)
        return out, lse


class SeesNoWindow(Planted):
    def attend(self, q, k, v, layer, table):
        return attend_step(q, k, v, replace(layer, spec=replace(layer.spec, window=None)), table)


class EndsInTheStep(Planted):
    """Takes the end of a block, a position, for a place in the step."""

    def attend(self, q, k, v, layer, table):
        return attend_step(q, k, v, layer, replace(table, prefix_lens=table.prefix_lens * 0))


class SeesSiblings(Planted):
    def attend(self, q, k, v, layer, table):
        wrong = replace(table, tree_mask=table.tree_mask.clone().fill_(True))
        return attend_step(q, k, v, layer, wrong)


class SaysNoLse(Planted):
    def attend(self, q, k, v, layer, table):
        return attend_step(q, k, v, layer, table)[0], None


FAULTS = [
    (ReadsThePool, EXTEND, "layer 0: error inf"),
    (WritesItsRows, EXTEND, "K of layer 0: slots [16] do not hold"),
    (CountsSinks, EXTEND, "looks like: sinks applied to the step alone"),
    (SeesNoWindow, BLOCKS, "looks like: no window"),
    (SeesNoWindow, TREE, "looks like: no window"),
    (EndsInTheStep, BLOCKS, "layer 0: error"),
    (SeesSiblings, VERIFY, "looks like: full mask"),
    (SaysNoLse, EXTEND, "lse of forward must be torch.float32"),
]


@pytest.mark.parametrize(
    ("fault", "case", "text"), FAULTS, ids=[f"{f[0].__name__}-{f[1]}" for f in FAULTS]
)
def test_a_planted_fault_fails_its_cell_and_is_named(fault, case, text):
    result = cell(fault, CASES[case], RunnerKind.EAGER)
    assert result.status is Status.FAILING
    assert text in result.reason, result.reason


@pytest.mark.parametrize("case", sorted({case for _, case, _ in FAULTS}))
def test_the_backend_they_are_planted_in_is_right(case):
    result = cell(Planted, CASES[case], RunnerKind.EAGER)
    assert result.status is Status.PROVEN, result.reason


@pytest.mark.parametrize("case", [TINY, TREE])
def test_the_triton_backend_is_triton_on_a_cpu_too(monkeypatch, case):
    asked = []

    def spied(*args, **kwargs):
        asked.append(kwargs)
        return attend_step(*args, **kwargs)

    monkeypatch.setattr(triton_backend, "attend_step", spied)
    result = cell(TritonBackend, CASES[case], RunnerKind.EAGER)
    assert result.status is Status.PROVEN, result.reason
    assert all(each == {"by_triton": True} for each in asked)
    assert asked


def wider(window):
    return None if window is None else window + 1


BOTH_WAYS = {
    "looks like: causal": lambda asked: {"causal": True},
    "looks like: window one wider": lambda asked: {"window": wider(asked["window"])},
    "looks like: a window that looks back alone": lambda asked: {"window_ahead": False},
    "looks like: no window": lambda asked: {"window": None},
}


@pytest.mark.parametrize("text", BOTH_WAYS)
def test_a_fault_of_a_layer_that_looks_both_ways_is_named(monkeypatch, text):
    def wrong(*args, **asked):
        return ragged_attention(*args, **asked | BOTH_WAYS[text](asked))

    monkeypatch.setattr(attention_layer, "ragged_attention", wrong)
    result = cell(TorchBackend, CASES[TEXTS], RunnerKind.EAGER)
    assert result.status is Status.FAILING
    assert text in result.reason, result.reason


def test_lengths_of_the_capture_fail_in_its_replay(monkeypatch):
    """The graph holds another tensor than the one that derive writes."""

    def frozen(q, k, v, cu_q, cu_k, **asked):
        ends = cu_q.detach().tolist()
        return ragged_attention(q, k, v, *[cu_q.new_tensor(ends)] * 2, **asked)

    assert cell(TorchBackend, CASES[TEXTS], RunnerKind.RECORDED).status is Status.PROVEN
    monkeypatch.setattr(attention_layer, "ragged_attention", frozen)
    result = cell(TorchBackend, CASES[TEXTS], RunnerKind.RECORDED)
    assert result.status is Status.FAILING


def test_the_kernel_of_gpus_is_asked_for_by_who_runs_on_them(monkeypatch):
    asked = []

    def spied(*args, by_triton, **rest):
        asked.append(by_triton)
        return ragged_attention(*args, **rest)  # a CPU's, which is faster

    monkeypatch.setattr(attention_layer, "ragged_attention", spied)
    assert cell(TritonBackend, CASES["embed/extend/tiny"], RunnerKind.EAGER).status is Status.PROVEN
    assert cell(TorchBackend, CASES["embed/extend/tiny"], RunnerKind.EAGER).status is Status.PROVEN
    half = len(asked) // 2
    assert asked == [True] * half + [False] * half
    assert half
