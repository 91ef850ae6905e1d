"""The sanitizer over rounds: drafters that touch dead bytes are named, though the text is right."""

import re
from dataclasses import replace
from pathlib import Path

import faulty_backends
import faulty_proposers as faulty
import pytest
import torch
from faulty_proposers import WrappedProposer, wrapped
from in_turn import in_turn
from tiny_drafters import CHAIN, TREE, MakeProposer, eagle3, ngram, standalone
from tiny_runner import GREEDY, Driver, TinyModel, random_prompts, with_logprobs

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import SanitizerError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import FinishCode
from paceline.runner import build
from paceline.runner.extents import PaddedSize
from paceline.runner.recording.recorded import RecordedGraph
from paceline.runner.sanitizer.live_rows import live_rows

ROWS = (2, 5, 7)
LENGTHS = (5, 11, 3)
SOURCE = Path(faulty.__file__).read_text().splitlines()


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few graph sizes on a CPU too, so that 3 requests are padded."""
    monkeypatch.setitem(build._EVERY_SIZE, "cpu", 1)


def joined(
    tiny: TinyModel,
    shape: DraftShape,
    make: MakeProposer,
    params: tuple[SamplingParams, ...] = (GREEDY,) * 3,
    max_lens: tuple[int, ...] = (120, 120, 120),
    **settings: object,
) -> Driver:
    """A driver behind prompts in two chunks."""
    driver = Driver(tiny, draft=shape, make_proposer=make, **{"boot": False} | settings)
    for row, prompt, wanted, max_len in zip(
        ROWS, random_prompts(LENGTHS), params, max_lens, strict=True
    ):
        driver.join(row, prompt, wanted, max_len=max_len)
    driver.collect(driver.launch_prefill(dict(zip(ROWS, (3, 6, 1), strict=True)), emits=False))
    driver.collect(driver.launch_prefill(dict(zip(ROWS, (2, 5, 2), strict=True))))
    return driver


def run(driver: Driver) -> dict[int, list[int]]:
    """Rounds and plain steps in changing company."""
    driver.rounds(ROWS, 3)
    driver.decode(ROWS[1:])
    driver.rounds((7, 2), 3)
    return driver.tokens


def report_of(
    tiny: TinyModel, fault: type[WrappedProposer], shape: DraftShape = CHAIN, **settings: object
) -> str:
    """What the sanitizer says of the first step that it refuses."""
    make = wrapped(eagle3(tiny, shape), fault)
    with pytest.raises(SanitizerError) as caught:
        joined(tiny, shape, make, **settings).rounds(ROWS, 3)
    return str(caught.value)


def line_of(text: str) -> str:
    """`file:line` of the only line of the faulty proposers that holds `text`."""
    (number,) = [number for number, line in enumerate(SOURCE, 1) if text in line]
    return f"faulty_proposers.py:{number}"


# --- right drafters -------------------------------------------------------------------------------

DRAFTERS = {
    "eagle3-chain": (CHAIN, lambda tiny: eagle3(tiny, CHAIN), None),
    "eagle3-tree-graph": (TREE, lambda tiny: eagle3(tiny, TREE), 8),
    "standalone-tree": (TREE, lambda tiny: standalone(tiny, TREE, noise=0.1), None),
    "standalone-chain-graph": (CHAIN, lambda tiny: standalone(tiny, CHAIN, noise=0.1), 8),
    "ngram-chain-graph": (CHAIN, lambda tiny: ngram(CHAIN), 8),
    "ngram-tree": (TREE, lambda tiny: ngram(TREE), None),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_right_drafters_leave_every_byte_as_they_do_without(tiny: TinyModel, name: str) -> None:
    shape, make, graph_max_reqs = DRAFTERS[name]
    plain, checked = (
        joined(tiny, shape, make(tiny), graph_max_reqs=graph_max_reqs, sanitize=sanitize)
        for sanitize in (False, True)
    )
    assert run(plain) == run(checked)
    for ours, theirs in zip(
        (plain.parts.table, plain.parts.proposer),
        (checked.parts.table, checked.parts.proposer),
        strict=True,
    ):
        for tensor_name, tensor in ours.named_tensors().items():
            assert torch.equal(tensor, theirs.named_tensors()[tensor_name]), tensor_name
    for ours, theirs in zip(_pools(plain), _pools(checked), strict=True):
        for mine, other in zip(ours.parts.values(), theirs.parts.values(), strict=True):
            assert torch.equal(mine, other)


def _pools(driver: Driver) -> tuple:
    return (*driver.parts.pools, *driver.parts.proposer.pools)


def test_sampled_rounds_with_logprobs_and_penalties_are_no_finding(tiny: TinyModel) -> None:
    params = (
        SamplingParams(temperature=0.9, top_p=0.8, seed=3, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0.7, frequency_penalty=0.5, seed=4, ignore_eos=True),
        with_logprobs(3),
    )
    make = standalone(tiny, TREE, noise=0.1)
    tokens = [
        run(joined(tiny, TREE, make, params, sanitize=sanitize)) for sanitize in (False, True)
    ]
    assert tokens[0] == tokens[1]


def test_rows_that_finish_or_do_not_draft_are_no_finding(tiny: TinyModel) -> None:
    params = (GREEDY, replace(GREEDY, speculative=False), GREEDY)
    driver = joined(
        tiny, CHAIN, standalone(tiny, CHAIN), params, (12, 120, 120), graph_max_reqs=None
    )
    driver.rounds(ROWS, 4)
    assert driver.finish[2] != 0
    assert [len(driver.tokens[row]) for row in ROWS] == [7, 5, 17]


def test_windowed_groups_of_both_models_are_no_finding(tiny_gemma: TinyModel) -> None:
    driver = joined(tiny_gemma, TREE, standalone(tiny_gemma, TREE, noise=0.1), graph_max_reqs=None)
    run(driver)


def test_a_row_whose_logits_are_not_finite_is_no_finding(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = joined(tiny, CHAIN, eagle3(tiny, CHAIN), graph_max_reqs=None)
    logits_of = tiny.ours.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        logits[4:8] = float("nan")  # of the second row
        return logits

    monkeypatch.setattr(tiny.ours, "logits", broken)
    driver.rounds(ROWS, 1)
    assert driver.tokens[2]
    assert driver.finish[5] is FinishCode.NON_FINITE


@pytest.mark.parametrize("extend", [1, 3])
def test_a_prompt_whose_logits_are_not_finite_is_no_finding(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, extend: int
) -> None:
    """The token behind it is never known; the drafter took in what stood there."""
    logits_of = tiny.ours.logits
    driver = Driver(
        tiny, draft=CHAIN, make_proposer=eagle3(tiny, CHAIN), graph_max_reqs=None, boot=False
    )
    for row, prompt in zip(ROWS, random_prompts(LENGTHS), strict=True):
        driver.join(row, prompt)
    ends = {row: length - extend for row, length in zip(ROWS, LENGTHS, strict=True)}
    driver.collect(driver.launch_prefill({r: n for r, n in ends.items() if n}, emits=False))
    monkeypatch.setattr(tiny.ours, "logits", lambda hidden: logits_of(hidden) * float("nan"))
    driver.collect(driver.launch_prefill(dict.fromkeys(ROWS, extend)))
    assert {driver.finish[row] for row in ROWS} == {FinishCode.NON_FINITE}


# --- what is reported -----------------------------------------------------------------------------

FAULTS = {
    "unknown-token": (
        faulty.ReadsUnknownToken,
        "table.token_ids, behind what is known: with poison there the step changes the drafts",
        "return state.token_ids[state.view.row_ids, behind]",
    ),
    "others-feature": (
        faulty.ReadsOthersFeature,
        "draft.features, rows outside the step: with poison there the step changes the drafts",
        "return (self.features[OUTSIDE] == 0)",
    ),
    "others-feature-written": (
        faulty.WritesOthersFeature,
        "the step overwrites draft.features, rows outside the step",
        "self.features[OUTSIDE].fill_(1.0)",
    ),
    "forgets-to-observe": (
        faulty.ForgetsToObserve,
        "draft.features, of the step before: with poison there the step changes the rows of",
        "before = self.features.clone()",
    ),
    "stale-rows": (
        faulty.ReadsStaleRows,
        "draft.input_ids: with poison there the step changes the drafts",
        'return self.inner.named_tensors()["draft.input_ids"]',
    ),
    "slots-of-drafts": (
        faulty.ReadsDrafts,
        "draft.kv.1.v: slots of rejected drafts, before this step writes them",
        'values = pool.layer(0).parts["v"].flatten(0, 1)',
    ),
}


@pytest.mark.parametrize(
    ("fault", "graph_max_reqs"), in_turn(FAULTS, {"graph": (4,), "eager": (None,)})
)
def test_a_drafter_that_touches_dead_bytes_is_reported_by_name_and_line(
    tiny: TinyModel, replays: list[RecordedGraph], fault: str, graph_max_reqs: int | None
) -> None:
    kind, names, code = FAULTS[fault]
    report = report_of(tiny, kind, graph_max_reqs=graph_max_reqs, boot=True)
    assert "drafts by EAGLE3" in report
    assert names in report
    assert line_of(code) in report
    in_round = not issubclass(kind, faulty.ForgetsToObserve | faulty.WritesOthersFeature)
    assert ("round of 3 requests, padded to " in report) == in_round
    assert bool(replays) == (in_round and graph_max_reqs is not None)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_drafter_that_says_another_root_is_reported(tiny: TinyModel, shape: DraftShape) -> None:
    report = report_of(tiny, faulty.SaysAnotherRoot, shape)
    assert re.match(r"root of row 2 in the drafts by EAGLE3 must be \d+, the newest token", report)


def test_a_round_that_is_another_when_it_runs_again_is_reported(tiny: TinyModel) -> None:
    report = report_of(tiny, faulty.HasHiddenState)
    assert "must be the same when it runs again, got a run that changes the drafts" in report


def test_a_draft_pass_that_reads_behind_the_reach_of_a_round_is_reported(tiny: TinyModel) -> None:
    backend = faulty_backends.ReadsSlot(CHAIN.reach)
    driver = joined(tiny, CHAIN, standalone(tiny, CHAIN, backend=backend), graph_max_reqs=None)
    with pytest.raises(SanitizerError, match=r"draft\.kv\.1\.v: slots behind kv_len"):
        driver.rounds(ROWS, 1)


# --- what lasts -----------------------------------------------------------------------------------


def test_live_rows_are_what_the_worked_example_says(tiny: TinyModel) -> None:
    shape = DraftShape(num_steps=5, topk=2, num_draft_tokens=6)
    driver = joined(tiny, shape, standalone(tiny, shape), graph_max_reqs=4, sanitize=False)
    (prefix,) = driver.parts.table.kv_committed[[5]].tolist()
    launched = driver.launch_round(ROWS)
    emitted = len(driver.collect(launched).token_ids[1])
    live = live_rows(driver.parts, launched.step, PaddedSize.uniform(4, 6))
    target, draft = live.target[1], live.draft[1]
    assert (target.prefix_len, target.kv_len) == (prefix, prefix + 6)
    assert (draft.prefix_len, draft.kv_len) == (prefix, prefix + 9)
    assert (live.target_padding, live.draft_padding) == (1 + 6, 1 + 9)
    for row in (target, draft):
        assert (row.kept_len, row.known_len) == (prefix + emitted, prefix + 1)
        assert (row.first_emitted, row.num_emitted) == (prefix + 1, emitted)
