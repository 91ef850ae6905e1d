"""commit: what a step writes back, row by row; and what it must leave alone."""

import pytest
import torch

from paceline.core.modes import MaskKind
from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import FinishCode, JoinDelta, StepLayout
from paceline.kernels.commit import Drafts
from paceline.layers.sampling import Sampled
from paceline.runner.buffers import StepBuffers
from paceline.runner.commit import commit
from paceline.runner.derive import derive
from paceline.runner.extents import PaddedSize
from paceline.runner.staging import StagingSlot
from paceline.runner.table.request_table import RequestTable

CPU = torch.device("cpu")
EOS = (2, 3)
WIDTH = 24
RUNNING, STOP, LENGTH, NON_FINITE = (int(code) for code in FinishCode)


class Bench:
    """A table and its buffers; `step` derives, commits made-up samples and returns the results."""

    def __init__(self) -> None:
        self.table = RequestTable(
            max_running=5, max_tokens=WIDTH, max_pages=(WIDTH,), eos_token_ids=EOS, device=CPU
        )
        self.buffers = StepBuffers(
            max_reqs=6, max_tokens=64, max_pages=(WIDTH,), kv_len_bound=WIDTH, device=CPU
        )

    def join(
        self, row: int, *, known: int, prefix: int, max_len: int = WIDTH, **params: object
    ) -> None:
        delta = JoinDelta(
            row=row,
            token_ids=tuple(range(100, 100 + known)),
            prompt_len=known,
            prefix_len=prefix,
            max_len=max_len,
            params=SamplingParams(temperature=0.0, **params),  # type: ignore[arg-type]
        )
        for destination, source in self.table.stage([delta], StagingSlot(1 << 16, pinned=False)):
            destination.copy_(source)

    def step(
        self,
        rows: tuple[int, ...],
        extend_lens: tuple[int, ...],
        tokens: list[int],
        *,
        emits: tuple[bool, ...] | None = None,
        finite: list[bool] | None = None,
        padded_reqs: int | None = None,
        logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> list[list[int]]:
        layout = StepLayout(rows=rows, extend_lens=extend_lens, emits=emits or (True,) * len(rows))
        size = PaddedSize.exact(layout)
        if padded_reqs is not None:
            size = PaddedSize.uniform(padded_reqs, extend_lens[0])
        slot = StagingSlot(1 << 12, pinned=False)
        ((destination, source),) = self.buffers.fill(layout, size, slot)
        destination.copy_(source)
        view = self.buffers.view(size, MaskKind.CAUSAL)
        derive(self.buffers, self.table, view, (1,))
        chosen, top_ids, top_values = logprobs or (None, None, None)
        sampled = Sampled(
            token_ids=torch.tensor(tokens + [9] * (size.reqs - len(tokens))),
            finite=torch.tensor((finite or [True] * len(rows)) + [True] * (size.reqs - len(rows))),
            chosen_logprob=chosen,
            top_ids=top_ids,
            top_values=top_values,
        )
        commit(self.buffers, self.table, view, sampled)
        return self.buffers.results_of(len(rows), 1).tolist()

    def assert_pad_row_is_untouched(self) -> None:
        assert self.table.kv_committed[PAD_ROW] == PAD_PREFIX_LEN
        assert self.table.finish[PAD_ROW] == RUNNING
        assert not self.table.token_ids[PAD_ROW].any()


def test_a_row_advances_by_its_extend_and_remembers_its_token() -> None:
    bench = Bench()
    bench.join(4, known=5, prefix=2)
    bench.join(1, known=7, prefix=6)
    assert bench.step((4, 1), (3, 1), [41, 11]) == [[1, RUNNING, 41], [1, RUNNING, 11]]
    assert bench.table.kv_committed.tolist() == [1, 7, 0, 0, 5, 0]
    assert bench.table.token_ids[4, :7].tolist() == [100, 101, 102, 103, 104, 41, 0]
    assert bench.table.token_ids[1, :9].tolist() == [*range(100, 107), 11, 0]
    assert bench.step((4,), (1,), [42]) == [[1, RUNNING, 42]]
    assert bench.table.token_ids[4, :8].tolist() == [100, 101, 102, 103, 104, 41, 42, 0]
    bench.assert_pad_row_is_untouched()


def test_log_probabilities_go_to_the_rows_of_the_step() -> None:
    bench = Bench()
    for row in (1, 2):
        bench.join(row, known=5, prefix=4)
    chosen, values = torch.tensor([-1.0, -2.0]), -torch.arange(6.0).view(2, 3)
    ids = torch.arange(6).view(2, 3)
    bench.step((1, 2), (1, 1), [41, 11], logprobs=(chosen, ids, values))
    buffers = bench.buffers
    assert torch.equal(buffers.chosen_logprobs[:2], chosen)
    assert torch.equal(buffers.top_ids[:2, :3], ids)
    assert torch.equal(buffers.top_logprobs[:2, :3], values)


def test_log_probabilities_of_a_round_follow_the_path_of_each_request() -> None:
    """The first accepts the second child of its root; of what the other did not emit, anything."""
    bench = Bench()
    for row in (1, 2):
        bench.join(row, known=5, prefix=4)
    bench.step((1, 2), (3, 3), [41, 11])
    buffers = StepBuffers(
        max_reqs=2, max_tokens=6, max_pages=(WIDTH,), max_path=2, kv_len_bound=WIDTH, device=CPU
    )
    buffers.facts.copy_(bench.buffers.facts[:2])
    view = bench.buffers.view(PaddedSize.uniform(2, 3), MaskKind.CAUSAL)
    tokens = torch.tensor([[41, 50, 51], [11, 50, 51]])
    parents = torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32)
    sampled = Sampled(
        token_ids=torch.tensor([51, 60, 61, 70, 71, 72]),
        finite=torch.ones(6, dtype=torch.bool),
        chosen_logprob=-torch.arange(6.0),
        top_ids=torch.arange(12).view(6, 2),
        top_values=-torch.arange(12.0).view(6, 2),
    )
    drafts = Drafts(tokens, parents, bench.table.sampling.max_drafts)
    accepted = commit(buffers, bench.table, view, sampled, drafts, max_path=2)
    assert accepted is not None
    assert accepted.path.tolist() == [[0, 2], [0, 1]]
    assert buffers.results_of(2, 2)[:, [0, 2, 3]].tolist() == [[2, 51, 61], [1, 70, 0]]
    assert buffers.chosen_logprobs.tolist() == [0, -2, -3, -4]
    assert buffers.top_ids[:3, :2].tolist() == [[0, 1], [4, 5], [6, 7]]
    assert buffers.top_logprobs[:3, :2].tolist() == [[0, -1], [-4, -5], [-6, -7]]


@pytest.mark.parametrize("padded_reqs", [1, 2, 6])
def test_row_zero_keeps_the_padding_facts(padded_reqs: int) -> None:
    bench = Bench()
    bench.join(2, known=4, prefix=3)
    bench.step((2,), (1,), [50], padded_reqs=padded_reqs)
    bench.assert_pad_row_is_untouched()
    assert bench.table.kv_committed.tolist() == [1, 0, 4, 0, 0, 0]


def test_padded_rows_report_nothing() -> None:
    bench = Bench()
    bench.join(2, known=4, prefix=3)
    bench.buffers.results.fill_(7)
    bench.step((2,), (1,), [50], padded_reqs=4)
    assert bench.buffers.results_of(4, 1)[1:].tolist() == [[0, RUNNING, 0]] * 3


def test_a_chunk_that_is_not_final_advances_and_emits_nothing() -> None:
    bench = Bench()
    bench.join(1, known=10, prefix=0)
    bench.join(2, known=3, prefix=0)
    results = bench.step((1, 2), (4, 3), [2, 60], emits=(False, True))
    assert results == [[0, RUNNING, 0], [1, RUNNING, 60]]
    assert bench.table.kv_committed[1] == 4
    assert bench.table.token_ids[1, :10].tolist() == list(range(100, 110))
    bench.assert_pad_row_is_untouched()


@pytest.mark.parametrize("token", [*EOS, 77])
def test_an_end_token_and_a_stop_id_freeze_the_row_and_are_emitted(token: int) -> None:
    bench = Bench()
    bench.join(1, known=4, prefix=3, stop_token_ids=(77,))
    bench.join(2, known=4, prefix=3)
    assert bench.step((1, 2), (1, 1), [token, 78])[0] == [1, STOP, token]
    assert bench.table.finish.tolist() == [0, STOP, 0, 0, 0, 0]
    assert bench.table.token_ids[1, 4] == token


def test_another_requests_stop_id_is_no_stop() -> None:
    bench = Bench()
    bench.join(1, known=4, prefix=3, stop_token_ids=(77,))
    bench.join(2, known=4, prefix=3)
    assert bench.step((1, 2), (1, 1), [5, 77]) == [[1, RUNNING, 5], [1, RUNNING, 77]]


def test_ignore_eos_makes_the_end_token_plain() -> None:
    bench = Bench()
    bench.join(1, known=4, prefix=3, ignore_eos=True)
    assert bench.step((1,), (1,), [EOS[0]]) == [[1, RUNNING, EOS[0]]]


def test_a_row_that_knows_max_len_tokens_is_finished() -> None:
    bench = Bench()
    bench.join(1, known=4, prefix=3, max_len=6)
    assert bench.step((1,), (1,), [50]) == [[1, RUNNING, 50]]  # knows 5
    assert bench.step((1,), (1,), [51]) == [[1, LENGTH, 51]]  # knows 6
    assert bench.table.finish[1] == LENGTH


def test_a_stop_at_the_limit_is_reported_as_a_stop() -> None:
    bench = Bench()
    bench.join(1, known=4, prefix=3, max_len=5)
    assert bench.step((1,), (1,), [EOS[1]]) == [[1, STOP, EOS[1]]]


def test_a_chunk_that_is_not_final_is_not_finished_by_its_sample() -> None:
    bench = Bench()
    bench.join(1, known=6, prefix=0, max_len=3)
    assert bench.step((1,), (4,), [EOS[0]], emits=(False,)) == [[0, RUNNING, 0]]
    assert bench.table.finish[1] == RUNNING


def test_logits_that_are_not_finite_fail_that_row_only() -> None:
    bench = Bench()
    for row in (1, 2, 3):
        bench.join(row, known=4, prefix=3)
    results = bench.step((1, 2, 3), (1, 1, 1), [50, 0, 52], finite=[True, False, True])
    assert results == [[1, RUNNING, 50], [0, NON_FINITE, 0], [1, RUNNING, 52]]
    assert bench.table.finish.tolist() == [0, RUNNING, NON_FINITE, RUNNING, 0, 0]
    assert bench.table.kv_committed.tolist() == [1, 4, 3, 4, 0, 0]  # it emitted nothing
    assert not bench.table.token_ids[2, 4:].any()


def test_a_chunk_that_is_not_final_may_have_any_logits() -> None:
    bench = Bench()
    bench.join(1, known=6, prefix=0)
    assert bench.step((1,), (4,), [0], emits=(False,), finite=[False]) == [[0, RUNNING, 0]]


@pytest.mark.parametrize("code", [STOP, LENGTH, NON_FINITE])
def test_a_frozen_row_commits_nothing(code: int) -> None:
    bench = Bench()
    bench.join(1, known=4, prefix=3)
    bench.join(2, known=4, prefix=3)
    bench.table.finish[1] = code
    before = bench.table.token_ids[1].clone()
    assert bench.step((1, 2), (1, 1), [50, 51]) == [[0, RUNNING, 0], [1, RUNNING, 51]]
    assert bench.table.kv_committed[1] == 3
    assert bench.table.finish[1] == code
    assert torch.equal(bench.table.token_ids[1], before)
    bench.assert_pad_row_is_untouched()


def test_a_join_wakes_a_frozen_row() -> None:
    bench = Bench()
    bench.join(1, known=4, prefix=3)
    bench.step((1,), (1,), [EOS[0]])
    bench.join(1, known=6, prefix=2)
    assert bench.step((1,), (4,), [50]) == [[1, RUNNING, 50]]
    assert bench.table.kv_committed[1] == 6
