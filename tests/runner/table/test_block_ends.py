"""Where blocks end, on the device: a request's own tokens see ahead, and no others do."""

import pytest
import torch

from paceline.core.modes import MaskKind
from paceline.core.request.blocks import Blocks
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import JoinDelta, StepLayout
from paceline.runner.buffers import StepBuffers
from paceline.runner.derive import derive
from paceline.runner.extents import PaddedSize
from paceline.runner.staging import StagingSlot
from paceline.runner.table.block_ends import BlockEnds
from paceline.runner.table.request_table import RequestTable

CPU = torch.device("cpu")
MAX_TOKENS = 16


class Bench:
    """A request table with blocks, and the buffers of a step."""

    def __init__(self, *, has_blocks: bool = True) -> None:
        ends = BlockEnds(table_rows=6, max_tokens=MAX_TOKENS, device=CPU) if has_blocks else None
        self.table = RequestTable(
            max_running=5,
            max_tokens=MAX_TOKENS,
            max_pages=(4,),
            eos_token_ids=(),
            device=CPU,
            block_ends=ends,
        )
        self.buffers = StepBuffers(
            max_reqs=5,
            max_tokens=20,
            max_pages=(4,),
            has_blocks=has_blocks,
            kv_len_bound=MAX_TOKENS,
            device=CPU,
        )
        self.slot = StagingSlot(1 << 14, pinned=False)

    def join(
        self,
        row: int,
        *spans: tuple[int, int],
        num_tokens: int = 6,
        prefix_len: int = 0,
    ) -> int:
        """A request enters a row; returns the staged bytes."""
        delta = JoinDelta(
            row=row,
            token_ids=(9,) * num_tokens,
            prompt_len=num_tokens,
            prefix_len=prefix_len,
            max_len=MAX_TOKENS,
            params=SamplingParams(seed=0),
            blocks=Blocks(spans) if spans else None,
        )
        self.slot.reset()
        for destination, source in self.table.stage([delta], self.slot):
            destination.copy_(source)
        return self.slot._used

    def visible_end(self, rows: tuple[int, ...], extend_lens: tuple[int, ...]) -> list[int]:
        """Of a step that is padded by a row of 3 tokens."""
        layout = StepLayout(rows=rows, extend_lens=extend_lens, emits=(False,) * len(rows))
        size = PaddedSize.ragged(len(rows) + 1, sum(extend_lens) + 3)
        for destination, source in self.buffers.fill(layout, size, self.slot):
            destination.copy_(source)
        view = self.buffers.view(size, MaskKind.BLOCK)
        assert view.visible_end is not None
        derive(self.buffers, self.table, view, (4,))
        found: list[int] = view.visible_end.tolist()
        assert found[sum(extend_lens) :] == [2, 3, 4]  # prefix 1, and nobody sees ahead
        return found[: sum(extend_lens)]


def test_tokens_of_a_block_see_up_to_its_end() -> None:
    """The example of runner/table/block_ends.py."""
    bench = Bench()
    bench.join(3, (1, 4))
    bench.join(4, num_tokens=2)
    assert bench.visible_end((3, 4), (6, 2)) == [1, 4, 4, 4, 5, 6, 1, 2]


def test_behind_a_prefix_ends_are_positions_of_the_request() -> None:
    bench = Bench()
    bench.join(2, (0, 3), (4, 6), (6, 9), num_tokens=10, prefix_len=4)
    assert bench.visible_end((2,), (6,)) == [6, 6, 9, 9, 9, 10]


def test_who_enters_a_row_finds_no_block_of_who_left_it_and_stages_nothing_for_that() -> None:
    bench = Bench()
    alone = bench.join(1)
    bench.join(1, (0, 6))
    assert bench.visible_end((1,), (6,)) == [6] * 6
    bench.join(1, (2, 4))
    assert bench.visible_end((1,), (6,)) == [1, 2, 4, 4, 5, 6]
    assert bench.join(1) == alone
    assert bench.visible_end((1,), (6,)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("mask", list(MaskKind))
def test_a_view_has_ends_where_the_step_sees_ahead(mask: MaskKind) -> None:
    view = Bench().buffers.view(PaddedSize.ragged(2, 5), mask)
    assert (view.visible_end is not None) == (mask is MaskKind.BLOCK)


def test_a_table_without_blocks_takes_none() -> None:
    bench = Bench(has_blocks=False)
    assert "table.block_ends" not in bench.table.named_tensors()
    assert bench.buffers.visible_end.numel() == 0
    with pytest.raises(AssertionError, match="blocks in a table without"):
        bench.join(1, (0, 2))
