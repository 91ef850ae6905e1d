"""commit: what a step changed, back into the request table; and the results the host will read.

The device knows ids and limits: it freezes a row at an end token, a stop id, max_tokens or the end
of the context.  Strings, aborts and grammars are the host's.
"""

import torch

from paceline.attention.contract import StepView
from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import FinishCode
from paceline.layers.sampling import Sampled
from paceline.runner.buffers import StepBuffers
from paceline.runner.request_table import RequestTable


def commit(buffers: StepBuffers, table: RequestTable, view: StepView, sampled: Sampled) -> None:
    """Advance every live row by its extend length; append and emit the token of rows that emit.

    Row 0 and frozen rows (which derive made row 0) keep the padding facts.  Writes the table's
    device-owned fields and `buffers.results`.  Device-only, static shapes.
    """
    rows = view.row_ids
    is_live = rows != PAD_ROW
    wants_token = is_live & (buffers.facts[: view.padded_reqs, 2] != 0)
    emits = wants_token & sampled.finite

    table.kv_committed.index_copy_(0, rows, view.kv_lens.where(is_live, PAD_PREFIX_LEN))

    # Rows that emit nothing write token 0 at [PAD_ROW, 0], all of them the same value.
    column = view.kv_lens * emits
    flat_index = rows * emits * table.token_ids.shape[1] + column
    token_ids = (sampled.token_ids * emits).int()
    table.token_ids.view(-1).index_copy_(0, flat_index, token_ids)

    finish = _finish_codes(table, view, sampled, emits=emits, failed=wants_token & ~sampled.finite)
    table.finish.index_copy_(0, rows, finish)
    torch.stack((emits.int(), token_ids, finish), dim=1, out=buffers.results[: view.padded_reqs])

    if sampled.chosen_logprob is not None:
        assert sampled.top_ids is not None
        assert sampled.top_values is not None
        width = sampled.top_ids.shape[1]
        buffers.chosen_logprobs[: view.padded_reqs].copy_(sampled.chosen_logprob)
        buffers.top_ids[: view.padded_reqs, :width].copy_(sampled.top_ids)
        buffers.top_logprobs[: view.padded_reqs, :width].copy_(sampled.top_values)


def _finish_codes(
    table: RequestTable,
    view: StepView,
    sampled: Sampled,
    *,
    emits: torch.Tensor,  # [padded_reqs]  bool
    failed: torch.Tensor,  # [padded_reqs]  bool  wanted a token, logits not finite
) -> torch.Tensor:
    """[padded_reqs]  int32  FinishCode of each row after this step."""
    sampling, rows = table.sampling, view.row_ids
    stop_ids = sampling.stop_ids.index_select(0, rows)
    is_stop = (stop_ids == sampled.token_ids.unsqueeze(1)).any(1) & emits
    known = view.kv_lens + 1
    at_limit = (known >= sampling.max_len.index_select(0, rows)) & emits
    codes = at_limit.int().mul_(int(FinishCode.LENGTH))
    codes.masked_fill_(is_stop, int(FinishCode.STOP_TOKEN))
    return codes.masked_fill_(failed, int(FinishCode.NON_FINITE))
