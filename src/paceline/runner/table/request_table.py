"""RequestTable: what the device knows of every running request, one row each.

Each field has one owner.  The device owns committed length, token history and finish code; the
host owns page rows and sampling parameters.  The host writes a device-owned field only when a
request joins.  Row 0 is reserved: it holds the padding facts, so a padded row of a step needs no
special case anywhere.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.request.input_rows import EncoderInput
from paceline.core.request.token_ids import packed_ids
from paceline.core.step import (
    Delta,
    FinishCode,
    JoinDelta,
    OverlayDelta,
    PageDelta,
    PromptPositions,
)
from paceline.kernels.derive_rope import RopeRows
from paceline.layers.sampling import LogitsProcessor, PackedRow, SamplingTable
from paceline.runner.staging import Copy, StagingSlot
from paceline.runner.table.block_ends import BlockEnds
from paceline.runner.table.overlay import Overlay
from paceline.runner.table.runs import PADDING, join_runs, page_runs

NO_SECOND = 2**31 - 1  # behind every token


class RequestTable:
    """Rows 1..max_running hold requests.

    Device-owned, [rows, ...]; written by `commit`, and by the host when a request joins:
        kv_committed  [rows]  int32  tokens whose KV is in the cache
        finish        [rows]  int32  FinishCode; a row that is not RUNNING is frozen
        token_ids     [rows, max_tokens]  int32  every token known, prompt first
    Host-owned, changed by deltas:
        page_tables   [num_groups] of [rows, max_pages]  int32  page ids; unused: PAD_PAGE
        encoder_lens  [rows]  int32  rows of each request's encoder, where the model has layers that
                      read them; else None.  0: it brings none; row 0: PAD_PREFIX_LEN, so that what
                      is recorded over padding reads them
        second_from   [rows]  int32  the first token of a pair's second text, where the model tells
                      them apart; else None.  NO_SECOND: there is none; row 0: that
        sampling      SamplingTable
        overlay       Overlay, where requests may bring input rows
        rope          RopeRows, where the model's rope has several axes; else None
        block_ends    BlockEnds, where prompts may have blocks; else None
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_tokens: int,
        max_pages: tuple[int, ...],
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        plug_ins: Sequence[LogitsProcessor] = (),
        overlay: Overlay | None = None,
        rope_axes: int = 1,
        has_encoder: bool = False,
        block_ends: BlockEnds | None = None,
        tells_types: bool = False,
        samples: bool = True,
    ) -> None:
        """samples: whether some row does; where none does, what it would ask of the sampler stays
        on the host."""
        rows = max_running + 1
        self._eos_token_ids = eos_token_ids
        self._samples = samples
        self._state = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self._state[PAD_ROW, 0] = PAD_PREFIX_LEN
        self.token_ids = torch.zeros(rows, max_tokens, dtype=torch.int32, device=device)
        self.page_tables = tuple(
            torch.zeros(rows, width, dtype=torch.int32, device=device) for width in max_pages
        )
        self.encoder_lens: Tensor | None = None
        if has_encoder:
            self.encoder_lens = torch.zeros(rows, dtype=torch.int32, device=device)
            self.encoder_lens[PAD_ROW] = PAD_PREFIX_LEN
        self.second_from: Tensor | None = None
        if tells_types:
            self.second_from = torch.full((rows,), NO_SECOND, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(rows, device, plug_ins)
        self.overlay = overlay
        self.block_ends = block_ends
        self.rope = RopeRows.make(rows, max_tokens, rope_axes, device) if rope_axes > 1 else None

    @property
    def kv_committed(self) -> Tensor:
        """[rows]  int32  tokens whose KV is in the cache."""
        return self._state[:, 0]

    @property
    def finish(self) -> Tensor:
        """[rows]  int32  FinishCode."""
        return self._state[:, 1]

    def stage(self, deltas: Sequence[Delta], slot: StagingSlot) -> list[Copy]:
        """Put deltas into pinned memory; returns the copies the step's stream must execute."""
        copies: list[Copy] = []
        for joining in join_runs(deltas):
            copies += self._stage_joins(joining, slot)
        copies += [self._stage_pages(pages, slot) for pages in page_runs(deltas)]
        for delta in deltas:
            if isinstance(delta, OverlayDelta):
                assert self.overlay is not None, "the scheduler has slots where there is an overlay"
                copies.extend(self.overlay.stage(delta, slot))
            elif isinstance(delta, JoinDelta):
                copies.extend(self._stage_positions(delta.row, delta.positions, slot))
                copies.extend(self._stage_encoder_len(delta.row, delta.encoder, slot))
                if self.overlay is not None:
                    copies.extend(self.overlay.clear(delta.row))
                if self.block_ends is not None:
                    copies.extend(self.block_ends.stage(delta.row, delta.blocks, slot))
        return copies

    def _stage_pages(self, run: Sequence[PageDelta], slot: StagingSlot) -> Copy:
        first = run[0]
        table, end = self.page_tables[first.group], first.start + len(first.page_ids)
        assert end <= table.shape[1], (
            f"page delta ends at entry {end}, the table has {table.shape[1]}"
        )
        page_ids = np.array([delta.page_ids for delta in run], dtype=np.int32)
        return _rows(table, first.row, len(run))[:, first.start : end], slot.put(page_ids)

    def _stage_joins(self, run: Sequence[JoinDelta], slot: StagingSlot) -> list[Copy]:
        """Behind the shorter prompts of a run stand zeros, which nobody knows: to the end of their
        rows, where that pads as little as a run may be, for a copy of whole rows is one operation
        of the device and not two."""
        first, num_rows = run[0].row, len(run)
        lens, width = [len(delta.token_ids) for delta in run], self.token_ids.shape[1]
        if num_rows * width > PADDING * sum(lens):
            width = max(lens)
        tokens = np.zeros((num_rows, width), dtype=np.int32)
        for row, delta in zip(tokens, run, strict=True):
            assert delta.blocks is None or self.block_ends is not None, "blocks in a table without"
            ids = delta.packed_ids
            ids = packed_ids(delta.token_ids) if ids is None else ids
            row[: len(delta.token_ids)] = np.frombuffer(ids, np.int32)
        states = [(delta.prefix_len, FinishCode.RUNNING) for delta in run]
        staged: list[tuple[Tensor, NDArray[Any]]] = [
            (self.token_ids[:, :width], tokens),
            (self._state, np.array(states, dtype=np.int32)),
            *self._second_texts(run),
        ]
        if self._samples:
            packed = self._pack(run)
            staged.append((self.sampling.floats, _stacked([row.floats for row in packed])))
            staged.append((self.sampling.ints, _stacked([row.ints for row in packed])))
        return [(_rows(table, first, num_rows), slot.put(values)) for table, values in staged]

    def _pack(self, run: Sequence[JoinDelta]) -> list[PackedRow]:
        """What each asks of the sampler."""
        packed: list[PackedRow] = []
        for index, delta in enumerate(run):
            if packed and _ask_alike(run[index - 1], delta):
                packed.append(packed[-1])
                continue
            packed.append(
                self.sampling.pack(
                    delta.params,
                    prompt_len=delta.prompt_len,
                    max_len=delta.max_len,
                    eos_token_ids=self._eos_token_ids,
                    default_seed=0,
                )
            )
        return packed

    def _stage_encoder_len(
        self, row: int, given: EncoderInput | None, slot: StagingSlot
    ) -> list[Copy]:
        """How many rows a joining request's encoder has."""
        if self.encoder_lens is None:
            assert given is None, "rows for an encoder that the model has not"
            return []
        num_rows = np.array([0 if given is None else given.num_rows], dtype=np.int32)
        return [(self.encoder_lens[row : row + 1], slot.put(num_rows))]

    def _second_texts(self, run: Sequence[JoinDelta]) -> list[tuple[Tensor, NDArray[np.int32]]]:
        """Where the second text of each joining request's pair begins."""
        given = [delta.second_from for delta in run]
        if self.second_from is None:
            assert not any(given), "a pair's second text in a table that does not tell it apart"
            return []
        first = [NO_SECOND if each is None else each for each in given]
        return [(self.second_from, np.array(first, dtype=np.int32))]

    def _stage_positions(
        self, row: int, given: PromptPositions | None, slot: StagingSlot
    ) -> list[Copy]:
        """Where a joining request's tokens stand; without any given, at their index."""
        if self.rope is None:
            assert given is None, "positions of several axes in a table of one"
            return []
        num_given, delta = (0, 0) if given is None else (len(given.axes[0]), given.delta)
        ahead = (self.rope.ahead[row], slot.put(np.array((num_given, delta), dtype=np.int32)))
        if given is None:
            return [ahead]
        staged = np.ascontiguousarray(np.array(given.axes, dtype=np.int32).T)
        return [ahead, (self.rope.given[row, :num_given], slot.put(staged))]

    def named_tensors(self) -> dict[str, Tensor]:
        """The table's tensors by name, for guards."""
        tensors = {"table.state": self._state, "table.token_ids": self.token_ids}
        for group, table in enumerate(self.page_tables):
            tensors[f"table.page_table.{group}"] = table
        for name, tensor in self.sampling.named_tensors().items():
            tensors[f"table.sampling.{name}"] = tensor
        if self.overlay is not None:
            tensors |= self.overlay.named_tensors()
        if self.encoder_lens is not None:
            tensors["table.encoder_lens"] = self.encoder_lens
        if self.second_from is not None:
            tensors["table.second_from"] = self.second_from
        if self.block_ends is not None:
            tensors["table.block_ends"] = self.block_ends.ends
        if self.rope is not None:
            tensors["table.rope.given"], tensors["table.rope.ahead"] = self.rope
        return tensors


def _ask_alike(one: JoinDelta, other: JoinDelta) -> bool:
    """Whether two rows are the same to a sampler, as far as that is cheap to see."""
    lengths = one.prompt_len, one.max_len
    return one.params is other.params and lengths == (other.prompt_len, other.max_len)


def _stacked(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """[num_rows, width] of rows [width]; `np.stack` looks at each for longer than it copies it."""
    return np.concatenate(rows).reshape(len(rows), -1)


def _rows(table: Tensor, first: int, count: int) -> Tensor:
    """[count, ...]"""
    return table[first : first + count]
