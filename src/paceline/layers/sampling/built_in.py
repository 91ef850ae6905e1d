"""The logits processors every engine has: logit bias, penalties, min tokens.

In this order, which is the one of `transformers` (generation/utils.py, `_get_logits_processor`).
Each with its neutral parameter returns its input bit for bit.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from paceline.core.request.sampling_params import MAX_LOGIT_BIAS
from paceline.layers.sampling.processor import (
    Column,
    LogitsProcessor,
    RowFacts,
    RowState,
    Values,
    known_ids,
)

NO_TOKEN = -1  # fills unused id columns; equals no token id


class LogitBias(LogitsProcessor):
    """Adds each request's bias to the logits it names."""

    columns: ClassVar[Mapping[str, Column]] = {
        "ids": Column(torch.int64, MAX_LOGIT_BIAS, fill=NO_TOKEN),
        "values": Column(torch.float32, MAX_LOGIT_BIAS),
        "count": Column(torch.int64),
    }

    def pack(self, row: RowFacts) -> Mapping[str, Values]:
        bias = row.params.logit_bias
        return {
            "ids": [token for token, _ in bias],
            "values": [value for _, value in bias],
            "count": len(bias),
        }

    def apply(self, logits: Tensor, rows: Tensor, positions: Tensor, state: RowState) -> Tensor:
        ids = state.columns["ids"][rows]  # [num_rows, MAX_LOGIT_BIAS]
        used = known_ids(ids, state.columns["count"][rows], logits.shape[-1])
        values = state.columns["values"][rows].masked_fill(~used, 0.0)
        return logits.scatter_add(1, ids.masked_fill(~used, 0), values)


class Penalties(LogitsProcessor):
    """Repetition penalty over prompt and output (Keskar et al., "CTRL", 2019, in the sign-aware
    form of transformers' RepetitionPenaltyLogitsProcessor), then OpenAI's presence and frequency
    penalties over output: logit − presence·[count > 0] − frequency·count.

    The token history is counted anew at every call.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "repetition": Column(torch.float32),  # 1 = none
        "presence": Column(torch.float32),  # 0 = none
        "frequency": Column(torch.float32),  # 0 = none
    }

    def pack(self, row: RowFacts) -> Mapping[str, Values]:
        return {
            "repetition": row.params.repetition_penalty,
            "presence": row.params.presence_penalty,
            "frequency": row.params.frequency_penalty,
        }

    def apply(self, logits: Tensor, rows: Tensor, positions: Tensor, state: RowState) -> Tensor:
        vocab_size = logits.shape[-1]
        index = torch.arange(state.token_ids.shape[1], device=logits.device)[None, :]
        history = state.token_ids[rows].to(torch.int64)  # [num_rows, max_tokens]
        is_known = (index < positions[:, None]) & (history >= 0) & (history < vocab_size)
        is_output = is_known & (index >= state.prompt_len[rows][:, None])
        # Columns past the history, and all of a padded row, hold anything: they add 0, spread over
        # the vocabulary so that no single address takes every atomic addition.
        ids = torch.where(is_known, history, index % vocab_size)
        zeros = torch.zeros_like(logits, dtype=torch.int32)
        num_seen = zeros.scatter_add(1, ids, is_known.to(torch.int32))
        num_output = zeros.scatter_add(1, ids, is_output.to(torch.int32))

        repetition = state.columns["repetition"][rows][:, None]
        repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(num_seen > 0, repeated, logits)
        presence = state.columns["presence"][rows][:, None] * (num_output > 0)
        return logits - presence - state.columns["frequency"][rows][:, None] * num_output


class MinTokens(LogitsProcessor):
    """Forbids what would end a request that has too few tokens."""

    columns: ClassVar[Mapping[str, Column]] = {
        "min_len": Column(torch.int64),  # no stop while fewer tokens are known
    }

    def pack(self, row: RowFacts) -> Mapping[str, Values]:
        return {"min_len": row.prompt_len + row.params.min_tokens}

    def apply(self, logits: Tensor, rows: Tensor, positions: Tensor, state: RowState) -> Tensor:
        ids = state.stop_ids[rows]  # [num_rows, MAX_STOP_IDS]
        used = known_ids(ids, state.num_stop_ids[rows], logits.shape[-1])
        forbidden = used & (positions < state.columns["min_len"][rows])[:, None]
        values = torch.zeros_like(ids, dtype=torch.float32).masked_fill_(forbidden, float("-inf"))
        return logits.scatter_add(1, ids.masked_fill(~used, 0), values)


BUILT_IN: tuple[LogitsProcessor, ...] = (LogitBias(), Penalties(), MinTokens())
