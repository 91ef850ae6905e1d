"""The probe and its watcher: what forward may return, and what it must leave alone."""

import re
from dataclasses import replace

import pytest
import torch
from rig_cases import (
    BOTH,
    CASES,
    DECODE,
    EXTEND,
    FROZEN_KV,
    SINKS,
    TREE,
    Exact,
    cell,
    free_page,
    rig_of,
    sum_of,
)

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import Part
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.oracle.inputs import make_inputs
from paceline.proof.oracle.methods.softmax import attend_both
from paceline.proof.oracle.tolerance import expect
from paceline.proof.suite.case import Batch


def with_lse(change):
    """A backend that returns `change` of its log-sum-exp."""

    class Changed(Exact):
        def forward(self, q, k, v, layer, plan, part):
            out, lse = super().forward(q, k, v, layer, plan, part)
            return out, change(lse, layer)

    return Changed


def failing(backend, case, runner=RunnerKind.RECORDED):
    result = cell(backend, case, runner)
    assert result.status is Status.FAILING
    return result.reason


@pytest.mark.parametrize("case", [DECODE, EXTEND, TREE, SINKS, FROZEN_KV], ids=lambda c: c.name)
@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_a_right_lse_is_accepted_with_either_part(case, runner):
    assert cell(with_lse(lambda lse, layer: lse), case, runner).status is Status.PROVEN
    rig = rig_of(case, Exact, runner)
    rig.launch(0)
    assert rig.lse(0).shape == (case.batches[0].num_tokens, case.num_heads)


def test_rows_that_are_expanded_have_no_lse_of_the_backend():
    case = CASES["mla/mixed/expanded-behind-decode"]
    asked = []

    def note(lse, layer):
        asked.append(len(lse))
        return lse

    assert cell(with_lse(note), case, RunnerKind.EAGER).status is Status.PROVEN
    assert 0 < max(asked) < case.batches[0].num_tokens  # of the rows before these alone


@pytest.mark.parametrize("case", [DECODE, FROZEN_KV], ids=lambda c: c.name)
def test_an_lse_of_base_2_is_refused(case):
    reason = failing(with_lse(lambda lse, layer: lse / 0.6931471805599453), case)
    assert "lse " in reason
    assert "is allowed, at batch 0" in reason


def test_an_lse_that_counts_the_sinks_is_refused():
    reason = failing(with_lse(lambda lse, layer: torch.logaddexp(lse, layer.sinks)), SINKS)
    assert "layer 0: lse " in reason


def test_an_lse_of_one_key_too_few_is_refused():
    reason = failing(with_lse(lambda lse, layer: lse - 0.01), DECODE)
    assert "layer 0: lse 0.01 where" in reason


@pytest.mark.parametrize("part", list(Part), ids=lambda part: part.value)
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda lse: lse.t().contiguous(), r"torch.float32 [4, 3]"),
        (lambda lse: lse.double(), r"torch.float64 [3, 4]"),
        (lambda lse: lse[:-1], r"torch.float32 [2, 4]"),
    ],
    ids=["heads-first", "float64", "fewer-rows"],
)
def test_an_lse_of_another_form_is_named(part, change, got):
    case = FROZEN_KV if part is Part.PREFIX else DECODE
    reason = failing(with_lse(lambda lse, layer: change(lse)), case)
    assert f"lse of forward must be torch.float32 [3, 4], got {got};" in reason


def test_no_lse_is_a_fault_of_the_prefix_alone():
    nothing = with_lse(lambda lse, layer: None)
    assert cell(nothing, DECODE).status is Status.PROVEN
    assert "lse of forward must be torch.float32 [3, 4], got NoneType" in failing(
        nothing, FROZEN_KV
    )


def no_prefix_case():
    """A frozen-KV step in which one request has no prefix."""
    return replace(FROZEN_KV, batches=(Batch((0, 7), (1, 1)), *FROZEN_KV.batches[1:]))


def test_a_row_that_sees_nothing_has_an_lse_of_minus_infinity():
    case = no_prefix_case()
    found = expect(case, 0, make_inputs(case, 0))
    right = attend_both(case, case.batches[0], make_inputs(case, 0), 0)[1]
    assert torch.isneginf(right[0]).all()
    assert found.judge_lse(0, right.float()).is_right
    for wrong in (-1e30, 0.0, float("inf"), float("nan")):
        assert not found.judge_lse(0, right.masked_fill(torch.isneginf(right), wrong)).is_right


def test_a_row_that_sees_keys_has_a_finite_lse():
    case = no_prefix_case()
    found = expect(case, 0, make_inputs(case, 0))
    right = attend_both(case, case.batches[0], make_inputs(case, 0), 0)[1]
    right[1] = -torch.inf
    assert found.judge_lse(0, right).error == float("inf")


def changing(name):
    """A backend that scribbles on one of its arguments after it has used them."""

    class Changing(TorchBackend):
        def forward(self, q, k, v, layer, plan, part):
            found = super().forward(q, k, v, layer, plan, part)
            {"q": q, "k": k, "v": v}[name][0, 0, 0].add_(1)
            return found

    return Changing


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_changed_argument_is_named(name, runner):
    reason = failing(changing(name), DECODE, runner)
    assert f"forward of layer 0 must leave {name} alone, got it changed" in reason
    others = {"q", "k", "v"} - {name}
    assert not any(f"leave {other} alone" in reason for other in others)


def test_a_change_in_a_replay_is_told_apart_from_one_before():
    rig = rig_of(DECODE, changing("k"))
    for index in (0, 0, 1):
        assert any("leave k alone" in fault for fault in rig.launch(index))
    assert rig.unproven() is None
    rig._watched.clear()
    assert rig._watched.changed_arguments() == []


class SumsAFreePage(Exact):
    """Reads what is nobody's, by way of a helper."""

    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan, part)
        return out + sum_of(layer.v_cache[free_page(DECODE)]).to(out.dtype), lse


def test_a_read_of_what_is_dead_names_the_line_and_the_backends():
    (report, *_) = rig_of(DECODE, SumsAFreePage).launch(0)
    assert "kv.0.v" in report
    assert re.search(r"at rig_cases\.py:\d+, from test_probe\.py:\d+", report), report
