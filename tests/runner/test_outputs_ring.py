"""OutputsRing: what a step left in its buffers, as the host reads it."""

import pytest
import torch

from paceline.core.draft_shape import DraftShape
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import (
    FinishCode,
    RowDrafts,
    RunKind,
    Step,
    StepLayout,
    StepOutputs,
    StepRun,
)
from paceline.runner.buffers import StepBuffers
from paceline.runner.outputs_ring import LaunchedStep, OutputsRing
from paceline.runner.streams import InlineStream

CPU = torch.device("cpu")
MAX_REQS, MAX_PATH = 4, 3
CHAIN = DraftShape(num_steps=2, topk=1, num_draft_tokens=MAX_PATH)


ONE_EACH = [[1, 0, 70], [0, 3, 0], [1, 2, 72], [1, 1, 73]]
UNLIKE = [[1, 0, 10, 0, 0], [3, 0, 20, 21, 22], [2, 0, 30, 31, 0], [1, 0, 40, 0, 0]]
PATHS = [[3, 0, 10, 11, 12], [0, 3, 0, 0, 0], [1, 1, 30, 0, 0], [2, 2, 40, 41, 0]]


def buffers(results: list[list[int]], max_emitted: int, tree_rows: int = 0) -> StepBuffers:
    """Every entry tells where it lies: results plainly, log-probabilities by their row."""
    made = StepBuffers(
        max_reqs=MAX_REQS,
        max_tokens=16,
        max_pages=(4,),
        max_path=MAX_PATH,
        max_tree_rows=tree_rows,
        kv_len_bound=16,
        device=CPU,
    )
    made.results_of(MAX_REQS, max_emitted).copy_(torch.tensor(results))
    rows = made.chosen_logprobs.shape[0]
    made.chosen_logprobs.copy_(-torch.arange(rows).float())
    made.top_ids.copy_(torch.arange(rows).unsqueeze(1).expand_as(made.top_ids))
    return made


def received(
    num_reqs: int,
    *,
    is_round: bool,
    logprobs: bool,
    source: StepBuffers | None = None,
    draft: DraftShape = CHAIN,
    tells: tuple[int, ...] = (),
) -> StepOutputs:
    most = MAX_PATH if is_round else 1
    step = Step(
        epoch=5,
        layout=StepLayout(
            rows=tuple(range(1, num_reqs + 1)),
            extend_lens=(most,) * num_reqs,
            emits=(True,) * num_reqs,
        ),
        is_ragged=False,
        is_round=is_round,
        prefix_lens_bound=(4,) * num_reqs,
        sampler=SamplerTier.GREEDY,
        logprobs=logprobs,
        deltas=(),
        tells_drafts=tells,
    )
    stream = InlineStream()
    slot = OutputsRing(MAX_REQS, 16, draft=draft, pinned=False).slot(step.epoch)
    source = source or buffers(PATHS if is_round else ONE_EACH, most)
    rows = most if tells else 0
    stream.run(
        lambda: slot.receive(source, num_reqs, max_emitted=most, logprobs=logprobs, tree_rows=rows)
    )
    run = StepRun(RunKind.EAGER, num_reqs, num_reqs * most)
    return LaunchedStep(step, run, stream.record(), slot, most).wait()


def test_a_plain_step_brings_one_token_or_none() -> None:
    outputs = received(3, is_round=False, logprobs=False)
    assert outputs.token_ids == ((70,), (), (72,))
    assert outputs.finish == (FinishCode.RUNNING, FinishCode.NON_FINITE, FinishCode.LENGTH)
    assert outputs.logprobs is None


def test_a_round_brings_as_many_tokens_as_each_row_emitted() -> None:
    outputs = received(4, is_round=True, logprobs=False)
    assert outputs.token_ids == ((10, 11, 12), (), (30,), (40, 41))
    assert outputs.finish == (
        FinishCode.RUNNING,
        FinishCode.NON_FINITE,
        FinishCode.STOP_TOKEN,
        FinishCode.LENGTH,
    )
    source = buffers(UNLIKE, MAX_PATH)
    outputs = received(4, is_round=True, logprobs=False, source=source)
    assert outputs.token_ids == ((10,), (20, 21, 22), (30, 31), (40,))
    assert outputs.finish == (FinishCode.RUNNING,) * 4


@pytest.mark.parametrize(
    ("is_round", "rows"), [(True, [[0, 1, 2], [], [6], [9, 10]]), (False, [[0], [], [2], [3]])]
)
def test_log_probabilities_belong_to_the_tokens_emitted(
    is_round: bool, rows: list[list[int]]
) -> None:
    outputs = received(4, is_round=is_round, logprobs=True)
    assert outputs.logprobs is not None
    assert [[-each.chosen for each in request] for request in outputs.logprobs] == rows
    assert [[each.top_ids[0] for each in request] for request in outputs.logprobs] == rows


@pytest.mark.parametrize("topk", [1, 2])
def test_drafts_of_a_round_come_where_the_step_asks(topk: int) -> None:
    shape = DraftShape(num_steps=2, topk=topk, num_draft_tokens=3)
    source = buffers(PATHS, MAX_PATH, tree_rows=3 if topk > 1 else 0)
    source.input_ids[:12].copy_(torch.arange(12))
    if topk > 1:
        source.parents.copy_(torch.tensor([-1, 0, 0] * 3 + [-1, -1, 0]))
    told = received(4, is_round=True, logprobs=False, source=source, draft=shape, tells=(0, 2, 3))
    above = (-1, 0) if topk == 1 else (-1, -1)
    assert {row: told.drafts[row] for row in (0, 2)} == {
        row: RowDrafts(token_ids=(3 * row + 1, 3 * row + 2), parents=above) for row in (0, 2)
    }
    assert told.drafts[3].token_ids == ((10, 11) if topk == 1 else (11,))
    assert 1 not in told.drafts
    silent = received(4, is_round=True, logprobs=False, source=source, draft=shape)
    assert silent.drafts == {}
