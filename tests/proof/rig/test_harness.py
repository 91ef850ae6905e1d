"""The harness: what a cell comes to, whatever its class does, and what its reason says."""

from dataclasses import replace

import pytest
import torch
from named_cell import run_named
from rig_cases import BOTH, CPU, DECODE, TREE, Exact, cell

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.rig import harness
from paceline.proof.rig.contenders import Contender
from paceline.proof.rig.harness import examine
from paceline.proof.rig.pools import Pools
from paceline.proof.rig.prepared import prepare_case
from paceline.runner.sanitizer.poison import bits_of


class ForCuda(TorchBackend):
    capabilities = replace(TorchBackend.capabilities, device_types=frozenset({"cuda"}))


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_a_right_answer_is_proven_and_on_an_emulator_emulated(runner):
    proven = cell(TorchBackend, DECODE, runner)
    assert (proven.status, proven.reason) == (Status.PROVEN, None)
    assert 0 < proven.error < proven.tolerance
    emulated = cell(ForCuda, DECODE, runner, emulated=True)
    assert (emulated.status, emulated.reason) == (Status.EMULATED, None)


def test_an_emulated_class_is_asked_as_on_its_gpu():
    refused = cell(TorchBackend, emulated=True)
    assert refused.status is Status.REFUSED
    assert "cuda" in refused.reason


def test_a_result_names_its_cell():
    assert cell(TorchBackend).id == "dense/planted/decode/recorded/tiny-page16"


class NoTrees(TorchBackend):
    capabilities = replace(TorchBackend.capabilities, masks=frozenset(), returns_lse=False)


def test_every_reason_of_a_refusal_is_told():
    case = replace(TREE, sinks=True)
    both = replace(NoTrees.capabilities, sinks=False)
    refused = cell(type("NoSinks", (NoTrees,), {"capabilities": both}), case)
    assert refused.status is Status.REFUSED
    assert "; " in refused.reason
    assert "sinks" in refused.reason
    assert "tree" in refused.reason


# --- classes that break before they run -----------------------------------------------------------


class NoCapabilities(AttentionBackend):
    name = "planted"

    def make_buffers(self, limits):
        return None

    def plan(self, view, buffers):
        return None

    def forward(self, q, k, v, layer, plan, part):
        return q, None


class ReasonsRaise(TorchBackend):
    def unsupported_reasons(self, config):
        raise KeyError("head dims")


@pytest.mark.parametrize("case", [DECODE, TREE], ids=lambda c: c.name)
def test_a_class_without_capabilities_is_a_failing_cell(case):
    result = cell(NoCapabilities, case)
    assert result.status is Status.FAILING
    assert "raised AttributeError" in result.reason
    assert "'capabilities'" in result.reason


def test_a_class_whose_reasons_raise_is_a_failing_cell():
    result = cell(ReasonsRaise)
    assert result.status is Status.FAILING
    assert result.reason == "raised KeyError: 'head dims'"


# --- what a reason says ---------------------------------------------------------------------------


class TakesPage0(TorchBackend):
    """Loses the first page of every request, in the view too."""

    def plan(self, view, buffers):
        view.groups[0].page_table[:, 0].zero_()
        return super().plan(view, buffers)


def test_the_broken_invariant_comes_before_the_wrong_answer():
    reason = cell(TakesPage0, DECODE, RunnerKind.EAGER).reason
    assert reason.startswith("batch 0: page table row 0 of group 0 must be [")
    assert "; layer 0: error inf where " in reason


class Chatty(TorchBackend):
    def make_buffers(self, limits):
        raise RuntimeError("x" * 9000)


def test_a_reason_is_cut():
    reason = cell(Chatty).reason
    assert len(reason) < 2100
    assert reason.endswith("x ... and 7021 more characters")


class RightInBatch0(TorchBackend):
    """Answers nothing from the second batch on, which it knows by a length."""

    def make_buffers(self, limits):
        return super().make_buffers(limits), torch.zeros(1)

    def plan(self, view, buffers):
        buffers[1].add_((view.prefix_lens[0] == 8).float())
        return super().plan(view, buffers[0]), buffers[1]

    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan[0], part)
        return out * (plan[1] == 0).to(out.dtype), lse


def test_the_batch_that_went_wrong_is_named():
    assert DECODE.batches[1].prefix_lens[0] == 8
    reason = cell(RightInBatch0, DECODE, RunnerKind.EAGER).reason
    assert reason.startswith("batch 1: layer 0: error 0.")
    assert "is allowed, at batch 1, request " in reason


def test_a_comparison_that_would_accept_a_mistake_is_a_fault():
    prepared = replace(prepare_case(DECODE), blind=("batch 0, layer 0: first key dropped",))
    who = Contender(name="planted", backend=TorchBackend, is_emulated=False)
    finding = examine(prepared, who, RunnerKind.EAGER, CPU)
    assert finding.fault == "the comparison would accept batch 0, layer 0: first key dropped"


def test_a_blind_case_is_a_failing_cell(monkeypatch):
    blind = replace(prepare_case(DECODE), blind=("batch 2, layer 0: all zero",))
    monkeypatch.setattr(harness, "prepare_case", lambda case: blind)
    result = cell(TorchBackend)
    assert result.status is Status.FAILING
    assert "all zero" in result.reason


# --- cells by their ids ---------------------------------------------------------------------------


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_a_cell_runs_by_its_id(runner):
    result = run_named(f"dense/torch/decode/{runner.value}/tiny-page16")
    assert result.status is Status.PROVEN
    assert result.id == f"dense/torch/decode/{runner.value}/tiny-page16"


def test_a_digest_holds_every_bit_that_was_answered_and_written():
    class LastBit(Exact):
        def forward(self, q, k, v, layer, plan, part):
            out, lse = super().forward(q, k, v, layer, plan, part)
            return bits_of(out).bitwise_xor(1).view(out.dtype), lse

    class OtherLse(Exact):
        def forward(self, q, k, v, layer, plan, part):
            out, lse = super().forward(q, k, v, layer, plan, part)
            return out, None if lse is None else bits_of(lse).bitwise_xor(1).view(lse.dtype)

    one, again, bit, lse = (cell(each) for each in (Exact, Exact, LastBit, OtherLse))
    assert [result.reason for result in (one, again, bit, lse)] == [None] * 4
    assert one.digest == again.digest
    assert len({one.digest, bit.digest, lse.digest}) == 3
    assert cell(Exact, replace(DECODE, seed=1)).digest != one.digest


def test_a_digest_holds_what_the_step_wrote_not_dead_rows(monkeypatch):
    class DeadRows(Exact):
        """Answers of a frozen request's tokens are anybody's."""

        def forward(self, q, k, v, layer, plan, part):
            out, lse = super().forward(q, k, v, layer, plan, part)
            return torch.where(out.isnan(), torch.zeros_like(out), out), lse

    assert cell(DeadRows, TREE).digest == cell(Exact, TREE).digest
    wanted = cell(Exact).digest
    monkeypatch.setattr(Pools, "written", lambda pools, index: iter(()))
    assert cell(Exact).digest != wanted


def test_a_faulty_cell_has_no_digest():
    class Wrong(Exact):
        def forward(self, q, k, v, layer, plan, part):
            out, lse = super().forward(q, k, v, layer, plan, part)
            return out + 1.0, lse

    assert cell(Wrong).digest is None
