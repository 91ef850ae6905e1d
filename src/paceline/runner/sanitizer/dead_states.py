"""Which slots of states a step may read, and the others as regions to poison.

Worked example: a row that reads slot 3, which is the prefix tree's, writes slot 5 and copies it to
checkpoint slot 6; and a padded row:

    slot 3    read
    5, 6      written: poisoned before
    slot 0    read as zeros, written by padded rows: poisoned before
    others    neither: poisoned, and still so behind the step
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from paceline.core.errors import SanitizerError
from paceline.core.model.cache_groups import CHECKPOINT, READ, WRITE
from paceline.core.padding import PAD_PAGE
from paceline.runner.committers import StateMixer
from paceline.runner.sanitizer.live_rows import LiveRow
from paceline.runner.sanitizer.poison import (
    Poisoned,
    Region,
    bits_of,
    poison_bits,
    same_numbers,
)

_NOTHING = "start a row that reads slot 0 from zeros, whatever that slot holds"
_WRITE_FIRST = "write a request's slot before it is read, and its checkpoint from that"
_OTHERS = "read read_slots and write write_slots of the step's own rows"


class DeadStates:
    """One STATE group's slots in a step that has run once."""

    def __init__(
        self,
        mixer: StateMixer,
        live: Iterable[LiveRow],
        page_table: Tensor,
        state_lens: Tensor,
        before: Mapping[str, Tensor],
    ) -> None:
        """page_table: [padded_reqs, 3], state_lens: [padded_reqs] int32 of the step; before: the
        pool's tensors by name, from before the step.

        Raises SanitizerError where a row starts from a state of another length, or the step wrote
        a slot that it may only read.
        """
        self._name = mixer.pool.spec.name
        self._tensors = mixer.pool.named_tensors()
        self._before = before
        table, kept = page_table.tolist(), state_lens.tolist()
        rows = list(live)
        reads = {table[row.index][READ] for row in rows}
        self._written = {table[row.index][WRITE] for row in rows}
        self._written |= {table[row.index][CHECKPOINT] for row in rows if kept[row.index]}
        self._fresh = self._written - reads
        self._other = set(range(mixer.pool.num_slots)) - self._written - reads - {PAD_PAGE}
        self.dead_slot = min(self._other, default=PAD_PAGE)
        lens = before[f"kv.{self._name}.lens"].tolist()
        for row in rows:
            self._require(row, lens[table[row.index][READ]])
        self._require_unwritten(reads - self._written - {PAD_PAGE})
        self._expected = {name: self._slots(t, self._written) for name, t in self._tensors.items()}

    def changed(self, tolerance: float) -> list[str]:
        """Which tensors' written slots differ from what the first run left."""
        return [
            name
            for name, tensor in self._tensors.items()
            if not same_numbers(self._expected[name], self._slots(tensor, self._written), tolerance)
        ]

    def regions(self) -> list[Region]:
        """What to poison, by use and tensor."""
        uses = [
            ({PAD_PAGE}, "slot 0, of padded rows", _NOTHING, False),
            (self._fresh, "slots this step writes, before it does", _WRITE_FIRST, False),
            (self._other, "free slots and those of others", _OTHERS, True),
        ]
        return [
            Region(
                name=f"{name}: {use}",
                pieces=self._pieces(tensor, slots),
                remedy=remedy,
                is_foreign=is_foreign,
            )
            for slots, use, remedy, is_foreign in uses
            for name, tensor in self._tensors.items()
            if slots
        ]

    def table_region(self, group: int, table: Tensor, rows: set[int]) -> Region:
        """The request table's slots of rows that are not in the step; they stay valid slots.

        table: [rows, 3] int32; rows: of the step.
        """
        is_dead = torch.ones(table.shape, dtype=torch.bool)
        is_dead[sorted(rows | {PAD_PAGE})] = False
        poison = torch.where(table == self.dead_slot, 0, self.dead_slot).to(table.dtype)
        dead = is_dead.to(table.device)
        return Region(
            name=f"table.page_table.{group}, slots of rows outside the step",
            pieces=(Poisoned(tensor=table, index=None, dead=dead, poison=bits_of(poison)),),
            remedy="index the request table by the step's row_ids",
            is_foreign=True,
        )

    def _require(self, row: LiveRow, stands_for: int) -> None:
        if stands_for != row.prefix_len:
            raise SanitizerError.about(
                f"the slot of cache group '{self._name}' that row {row.row} reads",
                expected=f"one that stands for its {row.prefix_len} tokens",
                got=f"one that stands for {stands_for}",
                remedy="share a state under the length whose tokens it has seen, and no other",
            )

    def _require_unwritten(self, slots: set[int]) -> None:
        for name, tensor in self._tensors.items():
            was, is_ = self._slots(self._before[name], slots), self._slots(tensor, slots)
            if not same_numbers(was, is_, 0.0):
                raise SanitizerError.about(
                    f"{name} in the slots {sorted(slots)}, which the step reads alone,",
                    expected="as it was",
                    got="other numbers",
                    remedy="write write_slots: where they differ, others start from what was read",
                )

    def _slots(self, tensor: Tensor, slots: set[int]) -> Tensor:
        """Copies of some slots: [slots, ...] of the lengths, [layers, slots, ...] of a part."""
        index = torch.tensor(sorted(slots), dtype=torch.int64, device=tensor.device)
        return tensor.index_select(0 if tensor.dim() == 1 else 1, index)

    def _pieces(self, tensor: Tensor, slots: set[int]) -> tuple[Poisoned, ...]:
        index = torch.tensor(sorted(slots), dtype=torch.int64, device=tensor.device)
        layers = [tensor] if tensor.dim() == 1 else tensor.unbind()
        return tuple(
            Poisoned(tensor=layer, index=index, dead=None, poison=poison_bits(layer[index]))
            for layer in layers
        )
