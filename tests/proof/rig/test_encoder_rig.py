"""Cells of cross attention, and of positions with several axes: a fault is a failing cell that says
so."""

from dataclasses import replace

import pytest
from faulty_backends import KeepsCounter, ReadsStaleScratch
from rig_cases import BOTH, CASES, Exact, cell

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.proof.check.cell import RunnerKind, Status
from paceline.runner import derive as derive_module
from paceline.runner import encoder as encoder_module

CROSS = {name: case for name, case in CASES.items() if case.reads_encoder}
ROPE = {name: case for name, case in CASES.items() if case.rope_axes > 1}
DECODE = CASES["cross/decode/tiny"]
FROZEN = CASES["cross/decode/frozen"]


class PlansOnce(Exact):
    """By the lengths of its first step."""

    def __init__(self):
        self.lens = None

    def plan(self, view, buffers):
        if self.lens is None:
            self.lens = view.prefix_lens.clone()
        return replace(view, prefix_lens=self.lens)


class OneRowShort(Exact):
    def plan(self, view, buffers):
        return replace(view, prefix_lens=(view.prefix_lens - 1).clamp(min=0))


class NeverWithoutRows(Exact):
    """Takes a length of 0 for 1."""

    def plan(self, view, buffers):
        return replace(view, prefix_lens=view.prefix_lens.clamp(min=1))


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
@pytest.mark.parametrize("name", [*CROSS, *ROPE])
def test_the_torch_backend_proves_every_cell(name, runner):
    result = cell(TorchBackend, CASES[name], runner)
    assert result.status is Status.PROVEN, result.reason


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (OneRowShort, "looks like: last key dropped"),
        (NeverWithoutRows, "layer 0: error inf"),
    ],
)
def test_rows_that_are_not_the_encoders_are_seen(backend, text, runner):
    assert cell(Exact, DECODE, runner).status is Status.PROVEN
    result = cell(backend, DECODE, runner)
    assert result.status is Status.FAILING
    assert text in result.reason


@pytest.mark.parametrize("name", ["frozen", "lengths", "tiny"])
def test_a_buffer_that_its_backend_keeps_is_not_poisoned(name):
    """Its layers are the only ones that attend: no other backend says what is kept."""
    case = CASES[f"cross/decode/{name}"]
    result = cell(KeepsCounter, case)
    assert result.status is Status.PROVEN, result.reason
    stale = cell(ReadsStaleScratch, case)
    assert stale.status is Status.FAILING
    assert "encoder.scratch: with poison there the step changes the logits" in stale.reason


def test_lengths_of_the_capture_fail_in_its_replay():
    result = cell(PlansOnce, DECODE)
    assert result.status is Status.FAILING
    assert result.reason.startswith("batch 1: ")


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_rows_that_are_not_written_are_seen(monkeypatch, runner):
    monkeypatch.setattr(encoder_module, "bind_write_kv", lambda *arguments: lambda: None)
    result = cell(TorchBackend, DECODE, runner)
    assert result.status is Status.FAILING
    for part in ("K", "V"):
        assert f"{part} of layer 0: slots [" in result.reason


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_a_length_that_the_step_has_for_the_encoders_is_seen(monkeypatch, runner):
    def of_the_step(encoder_lens, view, group):
        view.groups[group].prefix_lens.copy_(view.prefix_lens)
        view.groups[group].kv_lens.copy_(view.kv_lens)

    monkeypatch.setattr(derive_module, "derive_encoder", of_the_step)
    reason = cell(TorchBackend, DECODE, runner).reason
    assert "prefix_lens must be [17, 0, 20], got [5, 9, 1]" in reason


def test_rows_of_a_finished_request_are_padding():
    result = cell(TorchBackend, FROZEN, RunnerKind.RECORDED)
    assert result.status is Status.PROVEN
    assert [batch.frozen for batch in FROZEN.batches] == [(), (0,), (1, 3)]


@pytest.mark.parametrize("name", ROPE)
def test_an_index_for_a_position_is_seen(monkeypatch, name):
    def by_index(rope, view):
        view.rope_positions.copy_(view.positions.expand_as(view.rope_positions))

    monkeypatch.setattr(derive_module, "derive_rope", by_index)
    reason = cell(TorchBackend, CASES[name], RunnerKind.EAGER).reason
    assert "positions the model was given on axis 0" in reason


@pytest.mark.parametrize("name", ROPE)
def test_a_window_by_rope_positions_is_seen(name):
    class WindowByRope(Exact):
        def query_positions(self, view, part):
            return view.rope_positions[0]

    assert cell(Exact, CASES[name]).status is Status.PROVEN
    result = cell(WindowByRope, CASES[name])
    assert result.status is Status.FAILING
    assert "layer 0: error" in result.reason


def test_lengths_are_longer_and_shorter_than_the_request_and_none():
    kinds = {
        (rows > prefix) - (rows < prefix) if rows else None
        for case in CROSS.values()
        for batch in case.batches
        for rows, prefix in zip(batch.encoder_lens, batch.prefix_lens, strict=True)
    }
    assert kinds >= {None, -1, 1}
    assert all(len({batch.encoder_lens for batch in case.batches}) == 3 for case in CROSS.values())


def test_prompts_end_before_a_step_and_within_it_and_some_have_no_positions():
    seen = set()
    for case in ROPE.values():
        for batch in case.batches:
            for given, prefix, kv_len in zip(
                batch.rope, batch.prefix_lens, batch.kv_lens, strict=True
            ):
                num = None if given is None else len(given.axes[0])
                seen.add(num if num is None else (num > prefix) + (num > kv_len))
    assert seen == {None, 0, 1}
