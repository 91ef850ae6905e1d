"""Cells of gated delta nets see what the field got wrong in windows, taps and commits."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.attention.contract import GraphSupport
from paceline.attention.linear import rows
from paceline.attention.linear.shape import LinearShape
from paceline.attention.states import StateBackend, StateConfig
from paceline.core.modes import MaskKind
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.rig.contenders import state_contender
from paceline.proof.rig.harness import run_cell
from paceline.proof.suite.states import state_cases

CASES = {f"{case.mode.value}/{case.name}": case for case in state_cases() if case.method == "gdn"}
PREFILL = "extend/prefill-shuffled"
CHUNKS = "extend/chunks-shuffled"
CHAIN = "target_verify/chain4-shuffled"
TREE = "target_verify/topk2-shuffled"

Faulty = Callable[..., Any]


def without_the_path(right: Faulty) -> Faulty:
    """The window of as many rows as were accepted, not of those."""
    return lambda *args, path=None: right(*args)


def taps_of_a_chain(right: Faulty) -> Faulty:
    return lambda view, *args: right(replace(view, tree_mask=None), *args)


def whatever_slot_0_holds(right: Faulty) -> Faulty:
    return lambda part, slots, is_new: right(part, slots, torch.zeros_like(is_new))


def window_newest_first(right: Faulty) -> Faulty:
    return lambda *args: right(*args).flip(2)


def every_row_lasts(right: Faulty) -> Faulty:
    return lambda *args: right(*args[:-1], torch.full_like(args[-1], args[-2].shape[1]))


def decay_of_the_row_alone(right: Faulty) -> Faulty:
    """G of a round is not summed along the branch."""

    def wrong(given: Any, *args: Any) -> Any:
        found = right(given, *args)
        return found if found.decay is None else found._replace(decay=given.decay)

    return wrong


@pytest.mark.parametrize(
    ("name", "fault", "case", "text"),
    [
        ("_place_windows", without_the_path, TREE, "state .* is allowed"),
        ("_place_taps", taps_of_a_chain, TREE, "output .* is allowed"),
        ("_fresh", whatever_slot_0_holds, PREFILL, "a slot that is not the request's own read"),
        ("next_windows_reference", window_newest_first, CHUNKS, "state .* is allowed"),
        ("next_windows_reference", window_newest_first, CHAIN, "state .* is allowed"),
        ("commit_states_reference", every_row_lasts, CHAIN, "state .* is allowed"),
        ("extend_states_reference", decay_of_the_row_alone, CHAIN, "state .* is allowed"),
    ],
)
def test_a_fault_is_a_failing_cell(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Callable[[Faulty], Faulty],
    case: str,
    text: str,
) -> None:
    monkeypatch.setattr(rows, name, fault(getattr(rows, name)))
    who = state_contender("torch", "gdn")
    result = run_cell(CASES[case], who, RunnerKind.RECORDED, torch.device("cpu"))
    assert result.status is Status.FAILING
    assert re.search(text, result.reason), result.reason


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GatesBeside", None),
        ("GatesWithoutWeight", "layer 1: output .* is allowed"),
        ("GatesOfAnotherRow", "layer 1: output .* is allowed"),
        ("SquaresOfSomeTiles", "layer 1: output .* is allowed"),
        ("GatesNothingButExtends", "layer 1: output .* is allowed"),
        ("GatesLiveRowsAlone", r"rows of extend_gated must be \[4, 32\], got \[3, 32\]"),
    ],
)
def test_a_gate_that_is_taken_at_once_is_held_to_the_oracle(name: str, text: str | None) -> None:
    named = [c for c in state_cases() if (c.method, c.name) == ("mamba2", "decode-shuffled")]
    who = state_contender(f"faulty_states:{name}", "mamba2")
    result = run_cell(named[0], who, RunnerKind.RECORDED, torch.device("cpu"))
    assert result.status is (Status.PROVEN if text is None else Status.FAILING)
    assert text is None or re.search(text, result.reason), result.reason


@pytest.mark.parametrize("method", ["gdn", "mamba2"])
def test_our_kernels_decode_as_the_oracle(method: str) -> None:
    """Those of Mamba 2 with a gate, too, in every other layer."""
    named = [c for c in state_cases() if (c.method, c.name) == (method, "decode-shuffled")]
    who = state_contender("triton", method)
    result = run_cell(named[0], who, RunnerKind.EAGER, torch.device("cpu"))
    assert result.status is Status.PROVEN, result.reason


@pytest.mark.parametrize(
    ("dtype", "key_dim", "reasons"),
    [
        (torch.float32, 512, ["keys of 512 numbers, of up to 256"]),
        (torch.float32, 256, ["keys of 256 numbers in torch.float32, of up to 128"]),
        (torch.bfloat16, 256, []),
    ],
)
def test_what_registers_and_shared_memory_cannot_hold_is_refused(
    dtype: torch.dtype, key_dim: int, reasons: list[str]
) -> None:
    shape = LinearShape(key_heads=1, value_heads=1, key_dim=key_dim, value_dim=8, conv_width=9)
    asked = StateConfig(
        device_type="cpu",
        dtype=dtype,
        masks=frozenset({MaskKind.TREE}),
        parts=shape.parts,
        state_every=64,
        graph=GraphSupport.ALWAYS,
        round_rows=65,
    )
    backend = state_contender("triton", "gdn").backend
    assert isinstance(backend, StateBackend)
    assert backend.unsupported_reasons(asked) == [
        "convolution over 9 tokens, of up to 8",
        *reasons,
        "rounds of 65 tokens, of up to 64",
    ]
