"""Faults to plant: extra_args={"trip": token} does something behind the first of these tokens."""

import time
from typing import ClassVar

import torch

from paceline.layers.sampling import Column, LogitsProcessor


class Trip(LogitsProcessor):
    """Nothing, as the others without their argument."""

    arguments = frozenset({"trip"})
    columns: ClassVar = {"token": Column(torch.int64)}

    def pack(self, row):
        return {"token": row.args.get("trip", -1)}

    def is_tripped(self, rows, positions, state):
        last = state.token_ids[rows, positions - 1]
        return (last == state.columns["token"][rows]) & (positions > state.prompt_len[rows])

    def apply(self, logits, rows, positions, state):
        return logits.clone()


class Raises(Trip):
    """An exception, in an engine without graphs."""

    def apply(self, logits, rows, positions, state):
        if self.is_tripped(rows, positions, state).any():
            raise ZeroDivisionError("a planted fault")
        return logits.clone()


class Hangs(Trip):
    """A step that takes long, in an engine without graphs."""

    def apply(self, logits, rows, positions, state):
        if self.is_tripped(rows, positions, state).any():
            time.sleep(600)
        return logits.clone()
