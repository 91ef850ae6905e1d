"""The request table's sampling columns: what each row asks of the sampler, on the device.

Owned by the host: a row is packed with `pack` and copied whole when its request joins.  Two tensors
hold everything, the columns of logits processors included, so that a join stages two short copies;
the rest are views of them.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request.sampling_params import MAX_STOP_IDS, SamplingParams
from paceline.kernels.draw import Laws
from paceline.kernels.edit_logits import Edits
from paceline.layers.sampling.built_in import BUILT_IN, NO_TOKEN
from paceline.layers.sampling.processor import (
    Column,
    LogitsProcessor,
    RowState,
    Values,
    column_values,
)

_MOST_ALIKE = 256  # packed rows that are kept for those who ask the same
KEEP_ALL = 2**31 - 1  # top_k of a row that keeps every token; max_drafts of one that takes any

_FLOATS = ("temperature", "top_p", "min_p")
_INTS = ("top_k", "seed", "prompt_len", "max_len", "num_stop_ids", "max_drafts", "asks")
_STOP_IDS = slice(len(_INTS), len(_INTS) + MAX_STOP_IDS)


class PackedRow(NamedTuple):
    """One row as host arrays; the field names are those of `SamplingTable.named_tensors`."""

    floats: NDArray[np.float32]  # [float width]
    ints: NDArray[np.int64]  # [int width]


class _Place(NamedTuple):
    """Where a column lies."""

    column: Column
    start: int  # first entry in its tensor

    @property
    def is_float(self) -> bool:
        return self.column.dtype == torch.float32

    @property
    def entries(self) -> slice:
        return slice(self.start, self.start + (self.column.width or 1))

    def write(self, row: NDArray[Any], values: Values) -> None:
        """Put one row's values where they belong; `row` is floats or ints, as the column is."""
        if isinstance(values, Sequence):
            row[self.entries] = self.column.fill
            row[self.start : self.start + len(values)] = values
        else:
            row[self.start] = values


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A processor with its columns."""

    processor: LogitsProcessor
    columns: Mapping[str, Tensor]  # name -> [rows] or [rows, width]


class SamplingTable:
    """One row per request-table row.  Every row starts neutral (greedy); row 0 stays so.

    plug_ins: logits processors behind the built-in ones.
    """

    def __init__(
        self, num_rows: int, device: torch.device, plug_ins: Sequence[LogitsProcessor] = ()
    ) -> None:
        processors = (*BUILT_IN, *plug_ins)
        self._alike: dict[Hashable, PackedRow] = {}
        self._float_width, self._int_width = len(_FLOATS), _STOP_IDS.stop
        self._layout = [(processor, self._place(processor)) for processor in processors]
        neutral = self.pack(
            SamplingParams(temperature=0.0),
            prompt_len=0,
            max_len=0,
            eos_token_ids=(),
            default_seed=0,
        )
        self.floats = torch.from_numpy(neutral.floats).to(device).repeat(num_rows, 1)
        self.ints = torch.from_numpy(neutral.ints).to(device).repeat(num_rows, 1)
        self.stages = tuple(
            Stage(processor, {name: self._view(place) for name, place in places.items()})
            for processor, places in self._layout
        )

        float_column = dict(zip(_FLOATS, self.floats.unbind(1), strict=False))
        self.temperature = float_column["temperature"]  # [rows]  float32  0 = greedy
        self.top_p = float_column["top_p"]  # [rows]  float32  1 = keep all
        self.min_p = float_column["min_p"]  # [rows]  float32  0 = keep all

        int_column = dict(zip(_INTS, self.ints.unbind(1), strict=False))
        self.top_k = int_column["top_k"]  # [rows]  int64  KEEP_ALL = keep all
        self.seed = int_column["seed"]  # [rows]  int64
        self.prompt_len = int_column["prompt_len"]  # [rows]  int64  tokens
        self.max_len = int_column["max_len"]  # [rows]  int64  finished once this many are known
        self.num_stop_ids = int_column["num_stop_ids"]  # [rows]  int64
        self.max_drafts = int_column["max_drafts"]  # [rows]  int64  a round accepts; 0 = none
        self.stop_ids = self.ints[:, _STOP_IDS]  # [rows, MAX_STOP_IDS]  int64  rest: NO_TOKEN
        self.asks = int_column["asks"]  # [rows]  int64  Asks
        self.laws = Laws(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        self.edits = self._edits()

    def pack(
        self,
        params: SamplingParams,
        *,
        prompt_len: int,
        max_len: int,
        eos_token_ids: Iterable[int],
        default_seed: int,
    ) -> PackedRow:
        """One request's row, which is not to be changed: others that ask the same have it too.

        prompt_len: known tokens that are prompt; max_len: tokens at which the row is finished;
        default_seed: used when the request names none, so give each request its own.  Raises
        RequestError when the stop ids do not fit.
        """
        asked = (params, prompt_len, max_len, tuple(eos_token_ids), default_seed)
        found = self._alike.get(asked)
        if found is None:
            if len(self._alike) == _MOST_ALIKE:
                self._alike.clear()
            self._alike[asked] = found = self._pack(*asked)
        return found

    def _pack(
        self,
        params: SamplingParams,
        prompt_len: int,
        max_len: int,
        eos_token_ids: tuple[int, ...],
        default_seed: int,
    ) -> PackedRow:
        stop_ids = params.all_stop_ids(eos_token_ids)
        floats = np.zeros(self._float_width, dtype=np.float32)
        floats[: len(_FLOATS)] = (params.temperature, params.top_p, params.min_p)
        ints = np.full(self._int_width, NO_TOKEN, dtype=np.int64)
        ints[: len(_INTS)] = (
            KEEP_ALL if params.top_k is None else min(params.top_k, KEEP_ALL),
            default_seed if params.seed is None else params.seed,
            prompt_len,
            max_len,
            len(stop_ids),
            KEEP_ALL if params.speculative else 0,
            int(params.asks),
        )
        ints[_STOP_IDS][: len(stop_ids)] = stop_ids
        for processor, places in self._layout:
            values = column_values(processor, params, prompt_len=prompt_len, stop_ids=stop_ids)
            for name, place in places.items():
                place.write(floats if place.is_float else ints, values[name])
        return PackedRow(floats, ints)

    def state(self, stage: Stage, token_ids: Tensor) -> RowState:
        """What a stage's processor may read; token_ids: [rows, max_tokens] int32 history."""
        return RowState(
            columns=stage.columns,
            token_ids=token_ids,
            prompt_len=self.prompt_len,
            stop_ids=self.stop_ids,
            num_stop_ids=self.num_stop_ids,
        )

    def state_of_rows(self, stage: Stage, rows: Tensor, histories: Tensor) -> RowState:
        """The same for rows that have histories of their own, at index 0, 1, 2, ...

        rows: [num_rows] int64 table rows; histories: [num_rows, max_tokens] int32.
        """
        return RowState(
            columns={name: column[rows] for name, column in stage.columns.items()},
            token_ids=histories,
            prompt_len=self.prompt_len[rows],
            stop_ids=self.stop_ids[rows],
            num_stop_ids=self.num_stop_ids[rows],
        )

    def _edits(self) -> Edits:
        """What the built-in processors ask, as their kernel reads it."""
        bias, penalties, min_tokens = (stage.columns for stage in self.stages[: len(BUILT_IN)])
        return Edits(
            asks=self.asks,
            bias_ids=bias["ids"],
            bias_values=bias["values"],
            bias_count=bias["count"],
            repetition=penalties["repetition"],
            presence=penalties["presence"],
            frequency=penalties["frequency"],
            prompt_len=self.prompt_len,
            min_len=min_tokens["min_len"],
            stop_ids=self.stop_ids,
            num_stop_ids=self.num_stop_ids,
        )

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors that own the storage, by the field names of PackedRow."""
        return {"floats": self.floats, "ints": self.ints}

    def _place(self, processor: LogitsProcessor) -> dict[str, _Place]:
        """Give every column of a processor its entries behind those already given."""
        places = {}
        for name, column in processor.columns.items():
            start = self._float_width if column.dtype == torch.float32 else self._int_width
            places[name] = place = _Place(column, start)
            if place.is_float:
                self._float_width = place.entries.stop
            else:
                self._int_width = place.entries.stop
        return places

    def _view(self, place: _Place) -> Tensor:
        owner = self.floats if place.is_float else self.ints
        return owner[:, place.start] if place.column.width is None else owner[:, place.entries]
