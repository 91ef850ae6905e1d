"""commit: what a step changed, back into the request table; and the results the host will read.

The device knows ids and limits: it freezes a row at an end token, a stop id, max_tokens or the end
of the context.  Strings, aborts and grammars are the host's.
"""

from paceline.kernels.commit import CommittedRows, EndRules, StepTokens
from paceline.kernels.commit import commit as commit_rows
from paceline.kernels.step_view import StepView
from paceline.layers.sampling import Sampled
from paceline.runner.buffers import StepBuffers
from paceline.runner.request_table import RequestTable


def commit(buffers: StepBuffers, table: RequestTable, view: StepView, sampled: Sampled) -> None:
    """Advance every live row by its extend length; append and emit the token of rows that emit.

    Row 0 and frozen rows (which derive made row 0) keep the padding facts.  Writes the table's
    device-owned fields and `buffers.results`.  Device-only, static shapes.
    """
    reqs, sampling = view.padded_reqs, table.sampling
    commit_rows(
        CommittedRows(table.kv_committed, table.finish, table.token_ids),
        EndRules(sampling.stop_ids, sampling.max_len),
        StepTokens(
            buffers.facts[:reqs], view.row_ids, view.kv_lens, sampled.token_ids, sampled.finite
        ),
        buffers.results[:reqs],
    )
    if sampled.chosen_logprob is not None:
        assert sampled.top_ids is not None
        assert sampled.top_values is not None
        width = sampled.top_ids.shape[1]
        buffers.chosen_logprobs[:reqs].copy_(sampled.chosen_logprob)
        buffers.top_ids[:reqs, :width].copy_(sampled.top_ids)
        buffers.top_logprobs[:reqs, :width].copy_(sampled.top_values)
