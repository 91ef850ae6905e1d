"""A layer that keeps a state per request, as its oracle says it: one token after another."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.core.model.config import RowPart

State = Mapping[str, Tensor]  # by part: [*part.shape]


class Recurrence(ABC):
    """One kind of mixer.  A module brings what `step` computes; whoever walks along chains and
    trees, and knows what a step may get wrong, is oracle/states.py, the same for all."""

    kind: str  # of mixer, and the method of its cells
    parts: tuple[RowPart, ...]  # of a request's state
    width: int  # numbers that a token brings
    out_shape: tuple[int, ...]  # of what the layer hands on, of a token

    def rows(self, num: int, generator: torch.Generator) -> Tensor:
        """[num, width] float64: what tokens bring, normal unless a kind needs other numbers."""
        return torch.randn(num, self.width, generator=generator, dtype=torch.float64)

    def carried(self, part: RowPart, generator: torch.Generator) -> Tensor:
        """[*part.shape] float64: of a state that a request brings to a step, likewise."""
        return torch.randn(part.shape, generator=generator, dtype=torch.float64)

    def given(self, rows: Tensor) -> Any:
        """[tokens, width] as a backend of this kind takes it: one tensor, or several by name."""
        return rows

    @abstractmethod
    def step(self, state: State, row: Tensor) -> tuple[State, Tensor]:
        """(the state behind a token, [*out_shape] what is handed on), in the dtype of `row`.

        row: [width].  Mutates neither.
        """
