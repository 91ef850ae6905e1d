"""The overlay on the device: a request's own tokens find its rows, and no others do."""

import pytest
import torch

from paceline.core.modes import MaskKind
from paceline.core.request.input_rows import InputRows
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import JoinDelta, OverlayDelta, StepLayout
from paceline.runner.buffers import StepBuffers
from paceline.runner.derive import derive
from paceline.runner.extents import PaddedSize
from paceline.runner.staging import StagingSlot
from paceline.runner.table.overlay import Overlay
from paceline.runner.table.request_table import RequestTable

CPU = torch.device("cpu")
MAX_TOKENS = 16


class Bench:
    """A request table with an overlay of 7 slots, and the buffers of a step."""

    def __init__(self) -> None:
        self.overlay = Overlay(
            num_slots=7,
            hidden_size=2,
            table_rows=6,
            max_tokens=MAX_TOKENS,
            dtype=torch.bfloat16,
            device=CPU,
        )
        self.table = RequestTable(
            max_running=5,
            max_tokens=MAX_TOKENS,
            max_pages=(4,),
            eos_token_ids=(),
            device=CPU,
            overlay=self.overlay,
        )
        self.buffers = StepBuffers(
            max_reqs=5,
            max_tokens=20,
            max_pages=(4,),
            has_overlay=True,
            kv_len_bound=MAX_TOKENS,
            device=CPU,
        )
        self.slot = StagingSlot(1 << 14, pinned=False)

    def change(self, *deltas: JoinDelta | OverlayDelta) -> int:
        """Apply deltas; returns the staged bytes."""
        self.slot.reset()
        for destination, source in self.table.stage(deltas, self.slot):
            destination.copy_(source)
        return self.slot._used

    def overlay_slots(self, rows: tuple[int, ...], extend_lens: tuple[int, ...]) -> list[int]:
        """overlay_slot of a step, padded by a row."""
        layout = StepLayout(rows=rows, extend_lens=extend_lens, emits=(False,) * len(rows))
        size = PaddedSize.ragged(len(rows) + 1, sum(extend_lens) + 3)
        for destination, source in self.buffers.fill(layout, size, self.slot):
            destination.copy_(source)
        view = self.buffers.view(size, MaskKind.CAUSAL, has_overlay=True)
        assert view.overlay_slot is not None
        derive(self.buffers, self.table, view, (4,))
        found: list[int] = view.overlay_slot.tolist()
        assert found[sum(extend_lens) :] == [0, 0, 0]
        return found[: sum(extend_lens)]


def join(row: int, *, num_tokens: int = 4, prefix_len: int = 0) -> JoinDelta:
    return JoinDelta(
        row=row,
        token_ids=(9,) * num_tokens,
        prompt_len=num_tokens,
        prefix_len=prefix_len,
        max_len=MAX_TOKENS,
        params=SamplingParams(seed=0),
    )


def source(start: int, num: int) -> InputRows:
    rows = torch.arange(2.0 * num).view(num, 2)
    return InputRows(start=start, num_tokens=num, media_hash="m", rows=rows)


def test_tokens_find_the_slots_of_their_rows() -> None:
    """The example of runner/table/overlay.py."""
    bench = Bench()
    brought = OverlayDelta(row=3, start=1, slots=(5, 6), source=source(1, 2))
    bench.change(join(3), brought, join(4))
    assert bench.overlay_slots((3, 4), (4, 2)) == [0, 5, 6, 0, 0, 0]
    assert bench.overlay.rows[[5, 6]].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_rows_behind_a_hit_go_to_any_slots_in_order() -> None:
    bench = Bench()
    brought = OverlayDelta(row=2, start=4, slots=(3, 7, 1, 2), source=source(2, 6))
    bench.change(join(2, num_tokens=9, prefix_len=4), brought)
    assert bench.overlay_slots((2,), (5,)) == [3, 7, 1, 2, 0]
    assert bench.overlay.rows[[3, 7, 1, 2], 0].tolist() == [4.0, 6.0, 8.0, 10.0]


def test_who_enters_a_row_finds_nothing_of_who_left_it_and_stages_nothing_for_that() -> None:
    bench = Bench()
    alone = bench.change(join(2))
    bench.change(join(2), OverlayDelta(row=2, start=0, slots=(1, 2, 3, 4), source=source(0, 4)))
    assert bench.overlay_slots((2,), (4,)) == [1, 2, 3, 4]
    assert bench.change(join(2)) == alone
    assert bench.overlay_slots((2,), (4,)) == [0, 0, 0, 0]


@pytest.mark.parametrize("has_overlay", [False, True])
def test_a_view_has_slots_where_the_step_reads_the_overlay(has_overlay: bool) -> None:
    view = Bench().buffers.view(PaddedSize.ragged(2, 5), MaskKind.CAUSAL, has_overlay=has_overlay)
    assert (view.overlay_slot is not None) == has_overlay
