"""Cells of the step alone: a planted fault fails its cell and is named."""

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
from paceline.proof.check.cell import RunnerKind, Status

EXTEND, VERIFY = "dense/extend/step-alone", "dense/target_verify/step-alone"
BLOCKS, TREE = "swa/extend/blocks-step-alone", "swa/target_verify/step-alone-tiny"
TINY = "dense/extend/blocks-step-alone-tiny"


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
