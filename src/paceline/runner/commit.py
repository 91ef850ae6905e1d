"""commit: what a step changed, back into the request table; and the results the host will read.

The device knows ids and limits: it freezes a row at an end token, a stop id, max_tokens or the end
of the context.  Strings, aborts and grammars are the host's.
"""

import torch
from torch import Tensor

from paceline.kernels.commit import Accepted, CommittedRows, Drafts, EndRules, SampledTokens
from paceline.kernels.commit import commit as commit_rows
from paceline.kernels.step_view import StepView
from paceline.layers.sampling import Sampled
from paceline.runner.buffers import StepBuffers
from paceline.runner.table.request_table import RequestTable


def commit(
    buffers: StepBuffers,
    table: RequestTable,
    view: StepView,
    sampled: Sampled,
    drafts: Drafts | None = None,
    *,
    max_path: int = 1,
) -> Accepted | None:
    """Emit what was sampled, as far as a round's drafts agree, and commit as many tokens.

    sampled: of each request, or of each row of a round.  max_path: tokens a request emits at most.
    Row 0 and frozen rows (which derive made row 0) keep the padding facts.  Writes the table's
    device-owned fields, and results and log-probabilities of `buffers`.  Returns what of the drafts
    was accepted.  Device-only, static shapes.
    """
    reqs, n, accepted = view.padded_reqs, 1, None
    if drafts is not None:
        n = view.max_extend_len
        accepted = Accepted(view.row_ids.new_empty(reqs, max_path), view.row_ids.new_empty(reqs))
    commit_rows(
        CommittedRows(table.kv_committed, table.finish, table.token_ids),
        EndRules(table.sampling.stop_ids, table.sampling.max_len),
        SampledTokens(
            buffers.facts[:reqs],
            view.row_ids,
            view.kv_lens,
            sampled.token_ids.view(reqs, n),
            sampled.finite.view(reqs, n),
        ),
        buffers.results_of(reqs, max_path),
        drafts,
        accepted,
    )
    rows = None if accepted is None else _rows_of(accepted.path, stride=n)
    _place_logprobs(buffers, sampled, rows)
    return accepted


def _rows_of(path: Tensor, *, stride: int) -> Tensor:
    """[padded_reqs * max_path]: rows of each request's own -> rows of the step."""
    first = torch.arange(path.shape[0], device=path.device) * stride
    return (path + first.unsqueeze(1)).flatten()


def _place_logprobs(buffers: StepBuffers, sampled: Sampled, rows: Tensor | None) -> None:
    """Write those of `rows` (None: all), one for each token that may be emitted."""
    if sampled.chosen_logprob is None:
        return
    assert sampled.top_ids is not None
    assert sampled.top_values is not None
    chosen, top_ids, top_values = (
        field if rows is None else field.index_select(0, rows)
        for field in (sampled.chosen_logprob, sampled.top_ids, sampled.top_values)
    )
    num, width = top_ids.shape
    buffers.chosen_logprobs[:num].copy_(chosen)
    buffers.top_ids[:num, :width].copy_(top_ids)
    buffers.top_logprobs[:num, :width].copy_(top_values)
