"""The request table's sampling columns: what each row asks of the sampler, on the device.

Owned by the host: a row is packed with `pack_row` and copied whole when its request joins.  Two
tensors hold everything, so that a join stages two short copies; the rest are views of them.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

NO_TOKEN = -1  # fills unused id columns; equals no token id
KEEP_ALL = 2**31 - 1  # top_k of a row that keeps every token

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTS = ("top_k", "seed", "prompt_len", "min_len", "max_len", "num_stop_ids", "num_bias")
_STOP_IDS = slice(len(_INTS), len(_INTS) + MAX_STOP_IDS)
_BIAS_IDS = slice(_STOP_IDS.stop, _STOP_IDS.stop + MAX_LOGIT_BIAS)
_BIAS_VALUES = slice(len(_FLOATS), len(_FLOATS) + MAX_LOGIT_BIAS)
FLOAT_WIDTH = _BIAS_VALUES.stop
INT_WIDTH = _BIAS_IDS.stop


class PackedRow(NamedTuple):
    """One row as host arrays; the field names are those of `SamplingTable.named_tensors`."""

    floats: NDArray[np.float32]  # [FLOAT_WIDTH]
    ints: NDArray[np.int64]  # [INT_WIDTH]


def pack_row(
    params: SamplingParams,
    *,
    prompt_len: int,
    max_len: int,
    eos_token_ids: Iterable[int],
    default_seed: int,
) -> PackedRow:
    """One request's row.

    prompt_len: known tokens that are prompt; max_len: tokens at which the row is finished;
    default_seed: used when the request names none, so give each request its own.  Raises
    RequestError when the stop ids do not fit.
    """
    stop_ids = params.all_stop_ids(eos_token_ids)
    floats = np.zeros(FLOAT_WIDTH, dtype=np.float32)
    floats[: len(_FLOATS)] = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    ints = np.full(INT_WIDTH, NO_TOKEN, dtype=np.int64)
    ints[: len(_INTS)] = (
        KEEP_ALL if params.top_k is None else min(params.top_k, KEEP_ALL),
        default_seed if params.seed is None else params.seed,
        prompt_len,
        prompt_len + params.min_tokens,
        max_len,
        len(stop_ids),
        len(params.logit_bias),
    )
    ints[_STOP_IDS][: len(stop_ids)] = stop_ids
    ints[_BIAS_IDS][: len(params.logit_bias)] = [token for token, _ in params.logit_bias]
    floats[_BIAS_VALUES][: len(params.logit_bias)] = [bias for _, bias in params.logit_bias]
    return PackedRow(floats, ints)


class SamplingTable:
    """One row per request-table row.  Every row starts neutral (greedy); row 0 stays so."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        greedy = SamplingParams(temperature=0.0)
        neutral = pack_row(greedy, prompt_len=0, max_len=0, eos_token_ids=(), default_seed=0)
        self.floats = torch.from_numpy(neutral.floats).to(device).repeat(num_rows, 1)
        self.ints = torch.from_numpy(neutral.ints).to(device).repeat(num_rows, 1)

        float_column = dict(zip(_FLOATS, self.floats.unbind(1), strict=False))
        self.temperature = float_column["temperature"]  # [rows]  float32  0 = greedy
        self.top_p = float_column["top_p"]  # [rows]  float32  1 = keep all
        self.min_p = float_column["min_p"]  # [rows]  float32  0 = keep all
        self.repetition = float_column["repetition"]  # [rows]  float32  1 = none
        self.presence = float_column["presence"]  # [rows]  float32  0 = none
        self.frequency = float_column["frequency"]  # [rows]  float32  0 = none
        self.bias_values = self.floats[:, _BIAS_VALUES]  # [rows, MAX_LOGIT_BIAS]  float32

        int_column = dict(zip(_INTS, self.ints.unbind(1), strict=False))
        self.top_k = int_column["top_k"]  # [rows]  int64  KEEP_ALL = keep all
        self.seed = int_column["seed"]  # [rows]  int64
        self.prompt_len = int_column["prompt_len"]  # [rows]  int64  tokens
        self.min_len = int_column["min_len"]  # [rows]  int64  no stop while fewer are known
        self.max_len = int_column["max_len"]  # [rows]  int64  finished once this many are known
        self.num_stop_ids = int_column["num_stop_ids"]  # [rows]  int64
        self.num_bias = int_column["num_bias"]  # [rows]  int64
        self.stop_ids = self.ints[:, _STOP_IDS]  # [rows, MAX_STOP_IDS]  int64  rest: NO_TOKEN
        self.bias_ids = self.ints[:, _BIAS_IDS]  # [rows, MAX_LOGIT_BIAS]  int64  rest: NO_TOKEN

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors that own the storage, by the field names of PackedRow."""
        return {"floats": self.floats, "ints": self.ints}
