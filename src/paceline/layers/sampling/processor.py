"""The interface of a logits processor: what it declares, packs on the host, and does on the device.

A processor sees rows = request x position.  What differs between requests it declares as columns:
the host packs them once, when a request joins; `apply` finds them by table row.  It keeps nothing
between calls, so that neither preemption nor speculation can leave something wrong behind.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, RequestError
from paceline.core.request.sampling_params import SamplingParams

Values = float | Sequence[float]  # of one column of one row; int64 columns hold integers


@dataclass(frozen=True, slots=True)
class Column:
    """One value, or `width` values, per row of the request table."""

    dtype: torch.dtype  # float32 or int64
    width: int | None = None  # None: one value, [rows]; else [rows, width]
    fill: int = 0  # behind the values of a row that brings fewer than `width`


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What a request is, when its columns are packed."""

    params: SamplingParams
    args: Mapping[str, Any]  # of params.extra_args, those this processor declares
    prompt_len: int  # known tokens that are prompt
    stop_ids: tuple[int, ...]  # end tokens included, unless ignored


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowState:
    """Device tensors by table row; `apply` reads them with `rows` and writes none of them."""

    columns: Mapping[str, Tensor]  # the processor's own: [table rows] or [table rows, width]
    token_ids: Tensor  # [table rows, max_tokens]  int32  the first `positions` entries are known
    prompt_len: Tensor  # [table rows]  int64  tokens
    stop_ids: Tensor  # [table rows, MAX_STOP_IDS]  int64  the first num_stop_ids entries count
    num_stop_ids: Tensor  # [table rows]  int64


class LogitsProcessor(ABC):
    """One change of the logits, before temperature and filters.  Has no state; made without
    arguments, once per engine."""

    arguments: ClassVar[frozenset[str]] = frozenset()  # keys of SamplingParams.extra_args
    columns: ClassVar[Mapping[str, Column]] = {}

    def check(self, args: Mapping[str, Any], vocab_size: int) -> None:
        """Raise RequestError for arguments it cannot honour.

        args: those of one request that it declares, at least one; sequences are tuples.  The
        default honours everything.
        """
        return None

    @abstractmethod
    def pack(self, row: RowFacts) -> Mapping[str, Values]:
        """The values of every column for one request; called on the host for each that joins.

        A request that does not ask for this processor gets values under which `apply` returns its
        row bit for bit.
        """

    @abstractmethod
    def apply(self, logits: Tensor, rows: Tensor, positions: Tensor, state: RowState) -> Tensor:
        """The changed logits: [num_rows, vocab] float32, a new tensor; mutates nothing.

        logits: [num_rows, vocab] float32; rows: [num_rows] int64, the table row of each; positions:
        [num_rows] int64, the index of the token to sample, which is the number of tokens known
        before it.  Device-only, static shapes, no host reads: recorded in graphs.
        """


def known_ids(ids: Tensor, counts: Tensor, vocab_size: int) -> Tensor:
    """Which id columns hold a token of the vocabulary: [num_rows, width] bool.

    ids: [num_rows, width] int64; counts: [num_rows] int64, the first entries that count.
    """
    column = torch.arange(ids.shape[1], device=ids.device)[None, :]
    return (column < counts[:, None]) & (ids >= 0) & (ids < vocab_size)


def column_values(
    processor: LogitsProcessor,
    params: SamplingParams,
    *,
    prompt_len: int,
    stop_ids: tuple[int, ...],
) -> Mapping[str, Values]:
    """What `processor` packs for one request.

    Raises ConfigError when the names are not those of its columns, RequestError when values are no
    numbers or too many.
    """
    facts = RowFacts(
        params=params, args=own_args(processor, params), prompt_len=prompt_len, stop_ids=stop_ids
    )
    values = processor.pack(facts)
    if values.keys() != processor.columns.keys():
        raise ConfigError.about(
            f"columns packed by {type(processor).__name__}",
            expected=sorted(processor.columns),
            got=sorted(values),
            remedy="pack every column it declares, and no other",
        )
    for name, column in processor.columns.items():
        if not _fits(column, values[name]):
            kind = "64-bit integer" if column.dtype == torch.int64 else "number"
            raise RequestError.about(
                f"column '{name}' of {type(processor).__name__}",
                expected=f"one {kind}"
                if column.width is None
                else f"at most {column.width} {kind}s",
                got=f"{values[name]!r}",
                remedy="refuse such arguments in check, or declare another column",
            )
    return values


def _fits(column: Column, values: Values) -> bool:
    if column.width is None:
        return _is_number(column, values)
    if not isinstance(values, Sequence) or len(values) > column.width:
        return False
    return all(_is_number(column, value) for value in values)


def _is_number(column: Column, value: object) -> bool:
    """Whether a column can hold it."""
    if column.dtype == torch.int64:
        return isinstance(value, int) and -(2**63) <= value < 2**63
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**127)


def own_args(processor: LogitsProcessor, params: SamplingParams) -> dict[str, Any]:
    """Those of a request's extra_args that `processor` declares."""
    return {name: value for name, value in params.extra_args if name in processor.arguments}
