"""Logits processors, defined once over rows = request x position.

Order: the processors of the table, built-in ones first; then temperature, top-k, top-p, min-p
(kernels/draw.py), the order in which `transformers` applies its processors and warpers
(generation/utils.py, `_get_logits_processor`).  Device-only, static shapes, recordable.
"""

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.layers.sampling.table import SamplingTable


def process_logits(
    logits: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    table: SamplingTable,
    token_ids: Tensor,
    histories: Tensor | None = None,
) -> Tensor:
    """Every processor of `table` in order: [num_rows, vocab] float32, a new tensor.

    logits: [num_rows, vocab] float32; rows, positions: [num_rows] int64 (table row; tokens known
    before the one to sample); token_ids: [table rows, max_tokens] int32, the known tokens first.
    histories: [num_rows, max_tokens] int32, where rows of one request know different tokens (nodes
    of a tree of drafts): a processor then finds every row's columns and tokens at the row's own
    index.  Raises KernelArgumentError when a processor returns another shape or dtype.
    """
    at = rows if histories is None else torch.arange(rows.shape[0], device=rows.device)
    for stage in table.stages:
        state = (
            table.state(stage, token_ids)
            if histories is None
            else table.state_of_rows(stage, rows, histories)
        )
        changed = stage.processor.apply(logits, at, positions, state)
        if changed.shape != logits.shape or changed.dtype != torch.float32:
            raise KernelArgumentError.about(
                f"logits returned by {type(stage.processor).__name__}",
                expected=f"float32 {list(logits.shape)}",
                got=f"{changed.dtype} {list(changed.shape)}",
                remedy="return a changed copy of the logits it was given",
            )
        logits = changed
    return logits
