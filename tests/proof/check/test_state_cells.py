"""Cells of layers that keep states: the documentation's example proves them, and each of its faults
is a failing cell that says what it looks like."""

import io
import json
import re

import pytest
import torch

from paceline.attention import mixers
from paceline.core.errors import ConfigError
from paceline.core.padding import PAD_ROW
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.check.flags import FLAGS
from paceline.proof.check.run import run_check
from paceline.proof.oracle.states import RECURRENCES
from paceline.proof.rig.contenders import state_contender
from paceline.proof.rig.harness import run_cell
from paceline.proof.rig.placement import place
from paceline.proof.suite.case import PageLayout
from paceline.proof.suite.modes import ForwardMode
from paceline.proof.suite.states import STATE_METHODS, state_cases
from paceline.runner import committers

ALL = {f"{case.method}/{case.mode.value}/{case.name}": case for case in state_cases()}
CASES = {f"{case.mode.value}/{case.name}": case for case in ALL.values() if case.method == "sum"}
EXAMPLE = "example_state_backend:SumBackend"
BOTH = (RunnerKind.EAGER, RunnerKind.RECORDED)
PREFILL = "extend/prefill-shuffled"
DECODE = "decode/decode-shuffled"
CHAIN = "target_verify/chain4-shuffled"
TREE = "target_verify/topk2-shuffled"


def run(name, case, runner=RunnerKind.RECORDED):
    return run_cell(CASES[case], state_contender(name), runner, torch.device("cpu"))


@pytest.mark.parametrize("name", ALL)
def test_the_backend_of_its_kind_proves_every_cell(name):
    case = ALL[name]
    who = state_contender(EXAMPLE if case.method == "sum" else "torch", case.method)
    for runner in BOTH:
        result = run_cell(case, who, runner, torch.device("cpu"))
        assert result.status is Status.PROVEN, f"{result.id}: {result.reason}"
        assert result.digest is not None


FAULTS = [
    ("ReadsWhereItWrites", DECODE, "output inf .*: a slot that is not the request's own read"),
    ("StartsFromSlotZero", PREFILL, "output inf .*: a slot that is not the request's own read"),
    ("CommitsByLength", TREE, "state .* at batch 0, request .*: state of as many rows, not"),
    ("CommitsEveryRow", CHAIN, "state .*looks like: state of every row, accepted or not"),
    ("CommitsNothing", CHAIN, "state .*looks like: state left as it was read"),
    ("WritesInARound", CHAIN, "state .* is allowed"),
    ("TakesATreeForAChain", TREE, "output .*looks like: a chain, not the tree"),
    (
        "KeepsAtEveryLength",
        DECODE,
        r"sum: slot \d+, where request \d keeps states of multiples of 8 tokens and now has \d+, "
        "must be as it was",
    ),
    ("WritesWhatItReads", DECODE, r"slot \d+, which request \d reads alone, must be as it was"),
    ("OneLayerForAll", CHAIN, "layer 0: state"),
    ("LiveRowsAlone", DECODE, r"out of extend must be \[4, 8\], got \[3, 8\]"),
]


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
@pytest.mark.parametrize(("name", "case", "text"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_a_failing_cell_that_says_so(name, case, text, runner):
    result = run(f"faulty_states:{name}", case, runner)
    assert result.status is Status.FAILING
    assert re.search(text, result.reason), result.reason


def test_a_plan_of_the_capture_fails_in_its_replay_alone():
    chunks = "extend/chunks-shuffled"
    assert run("faulty_states:PlansOnce", chunks, RunnerKind.EAGER).status is Status.PROVEN
    result = run("faulty_states:PlansOnce", chunks)
    assert result.status is Status.FAILING
    assert result.reason.startswith("batch 1: ")


@pytest.mark.parametrize("every", [4, 16])
def test_a_checkpoint_at_another_length_is_seen(monkeypatch, every):
    keep = committers.keep_states

    def wrong(*arguments, **named):
        keep(*arguments, **named | {"every": every})

    monkeypatch.setattr(committers, "keep_states", wrong)
    result = run(EXAMPLE, PREFILL, RunnerKind.EAGER)
    assert result.status is Status.FAILING
    wanted = {4: "and now has 4, must be as it was", 16: "stands at 8 tokens, must be a copy of"}
    assert wanted[every] in result.reason


def test_a_slot_that_says_another_length_is_seen(monkeypatch):
    keep = committers.keep_states

    def wrong(parts, lens, *arguments, **named):
        keep(parts, lens, *arguments, **named)
        lens.add_(1)

    monkeypatch.setattr(committers, "keep_states", wrong)
    reason = run(EXAMPLE, DECODE, RunnerKind.EAGER).reason
    assert re.search(
        r"slot \d+ of request 0, which stands at 8 tokens, must be noted so, got 9", reason
    )


def _others_too(parts, lens, view, group, num_kept, *, every, state_lens):
    """Slots that requests read alone, and those of finished ones and of nobody."""
    mine = group.page_table[:, 1:].flatten().long()
    others = torch.ones_like(lens).index_fill_(0, mine, 0)
    others[:1].zero_()
    lens.add_(others)


def _where_a_request_is_finished(parts, lens, view, *arguments, **named):
    """The same in a step with rows of padding alone."""
    before = lens.clone()
    _others_too(parts, lens, view, *arguments, **named)
    lens.copy_(torch.where((view.row_ids == PAD_ROW).any(), lens, before))


def _kept_where_nothing_is_due(parts, lens, view, group, num_kept, *, every, state_lens):
    """A checkpoint's length, of a state that was not copied."""
    lens.index_copy_(0, group.checkpoint_slots.long(), view.prefix_lens + num_kept)
    lens[:1].zero_()


def _a_boundary_off(parts, lens, view, group, num_kept, *, every, state_lens):
    state_lens.add_(every * (state_lens > 0))


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
@pytest.mark.parametrize(
    ("fault", "case", "text"),
    [
        (
            _others_too,
            DECODE,
            r"slot \d+, which request \d reads alone, must be noted as before, as \d+ tokens, got",
        ),
        (_others_too, CHAIN, r"slot \d+, of nobody in the step, must be noted as before"),
        (
            _kept_where_nothing_is_due,
            DECODE,
            r"slot \d+, where request 1 keeps states of multiples of 8 tokens and now has 9, "
            "must be noted as before, as 0 tokens, got 9",
        ),
        (
            _a_boundary_off,
            DECODE,
            "the host must be told 8 of request 0, which stands at 8 tokens, got 16",
        ),
    ],
)
def test_lengths_that_no_request_asked_for_are_seen(monkeypatch, fault, case, text, runner):
    keep = committers.keep_states

    def wrong(*arguments, **named):
        keep(*arguments, **named)
        fault(*arguments, **named)

    monkeypatch.setattr(committers, "keep_states", wrong)
    result = run(EXAMPLE, case, runner)
    assert result.status is Status.FAILING
    assert re.search(text, result.reason), result.reason


def test_the_length_of_a_finished_request_is_seen(monkeypatch):
    keep = committers.keep_states

    def wrong(*arguments, **named):
        keep(*arguments, **named)
        _where_a_request_is_finished(*arguments, **named)

    monkeypatch.setattr(committers, "keep_states", wrong)
    reason = run(EXAMPLE, "decode/frozen-rows-shuffled", RunnerKind.EAGER).reason
    assert re.search(r"slot \d+, of request 0, which is finished, must be noted as", reason), reason


def test_a_registry_gives_it_a_short_name(monkeypatch):
    monkeypatch.setitem(mixers.REGISTRIES, "sum", {"ours": EXAMPLE})
    assert state_contender("ours").backend.name == "sum-example"


def test_what_it_cannot_do_is_refused_with_the_reason():
    trees = run("faulty_states:HasNoTrees", TREE)
    assert (trees.status, trees.reason) == (Status.REFUSED, "mask tree, of causal")
    ragged = run("faulty_states:HasNoTrees", PREFILL)
    assert (ragged.status, ragged.reason) == (
        Status.REFUSED,
        "graphs of always steps, of uniform: --enforce-eager runs without",
    )
    assert run("faulty_states:HasNoTrees", CHAIN).status is Status.PROVEN
    other = run("faulty_states:OfAnotherKind", DECODE)
    assert (other.status, other.reason) == (Status.REFUSED, "kind of layers sum, of product")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("faulty_states:NeedsADecay", "complete, got no default for its constructor's decay"),
        ("example_backend:DenseBackend", "a subclass of StateBackend, got"),
        ("sums", "an importable package.module:Class"),
    ],
)
def test_a_name_that_cannot_be_made_is_refused(name, text):
    with pytest.raises(ConfigError, match=text):
        state_contender(name)


def check(path, **asked):
    """(exit code, document, what was printed) of a run."""
    values = {flag.name: False if flag.kind is bool else flag.default for flag in FLAGS}
    values |= {"device": "cpu", "workers": 1, "json": str(path)} | asked
    out = io.StringIO()
    code = run_check(values, out=out, err=io.StringIO())
    return code, json.loads(path.read_text()), out.getvalue()


def test_the_command_gives_a_matrix_and_names_the_cell_that_fails(tmp_path):
    names = [EXAMPLE, "faulty_states:CommitsByLength"]
    asked = {"state_backend": names, "filter": "target_verify and shuffled and not irregular"}
    code, document, text = check(tmp_path / "out.json", **asked)
    assert code == 1
    cells = {(each["backend"], each["runner"], each["variant"]): each for each in document["cells"]}
    assert {each["method"] for each in cells.values()} == {"sum"}
    failing = {key for key, each in cells.items() if each["status"] == "failing"}
    assert failing == {(names[1], runner.value, "topk2-shuffled") for runner in BOTH}
    cell = f"sum/{names[1]}/target_verify/eager/topk2-shuffled"
    assert f"FAILING {cell}\n  batch 0: layer 0: state" in text
    again = f"paceline check --full --state-backend {names[1]} --filter {cell}"
    assert f"again: {again}" in text


@pytest.mark.usefixtures("warm_workers")
def test_a_state_backend_that_cannot_be_loaded_ends_the_run_at_once(tmp_path):
    with pytest.raises(ConfigError, match="--state-backend must be a backend that can be loaded"):
        check(tmp_path / "out.json", state_backend=["no_module:Sums"])


# --- the cases ------------------------------------------------------------------------------------


def test_every_kind_has_an_oracle():
    assert list(STATE_METHODS) == list(RECURRENCES)
    assert {case.method for case in ALL.values()} == set(STATE_METHODS)


def test_cases_reach_every_step_in_both_layouts_of_slots():
    for layout in (PageLayout.CONTIGUOUS, PageLayout.SHUFFLED):
        mine = [case for case in CASES.values() if case.layout is layout]
        assert {case.mode for case in mine} == set(ForwardMode) - {
            ForwardMode.DRAFT_DECODE,
            ForwardMode.DLLM_EXTEND,
        }
        rounds = [case for case in mine if case.batches[0].accepted]
        assert {bool(case.batches[0].parents) for case in rounds} == {True, False}
        assert any(batch.frozen for case in rounds for batch in case.batches)


def test_slots_are_in_order_or_in_none():
    for case in CASES.values():
        slots = [slot for row in place(case, 0).pages[0] for slot in row[1:]]
        assert (slots == sorted(slots)) == (case.layout is PageLayout.CONTIGUOUS), case.name


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_some_requests_go_on_where_they_read_and_some_elsewhere_on_and_off_a_boundary(mode):
    seen = set()
    for case in CASES.values():
        for index, batch in enumerate(case.batches) if case.mode is mode else ():
            for (read, write, _), length in zip(
                place(case, index).pages[0], batch.committed, strict=True
            ):
                seen.add((read == write, length % case.state_every == 0))
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


def test_some_rounds_accept_the_root_alone_and_some_all_and_some_pass_a_boundary():
    kinds = set()
    for case in CASES.values():
        for batch in case.batches:
            for prefix, extend, rows in zip(
                batch.prefix_lens, batch.extend_lens, batch.accepted or (), strict=False
            ):
                every = case.state_every
                passed = (prefix + len(rows)) // every > prefix // every
                kinds.add((min(len(rows) - 1, 1) + (len(rows) == extend), passed))
    assert kinds >= {(0, True), (0, False), (1, True), (1, False), (2, True), (2, False)}


def test_requests_start_from_nothing_in_some_steps():
    assert any(read == 0 for read, _, _ in place(CASES[PREFILL], 0).pages[0])
