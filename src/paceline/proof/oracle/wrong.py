"""Wrong answers: what a batch would give under each classic mistake that could matter to it.

Answers are computed over dense scores, not by the oracle's walk, since there are many of them; a
test shows that without a mistake both agree.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.methods.softmax import TRUE, Meaning, VisibleKeys, visible_keys
from paceline.proof.oracle.mistakes import Mistake, mistakes
from paceline.proof.suite.case import Batch, Case

ROWS_AT_ONCE = 32


def wrong_answers(case: Case, batch: Batch, data: BatchData, layer: int) -> dict[str, Tensor]:
    """[num_tokens, heads, v_head_dim] float64 of each mistake that touches a row."""
    truth = answer(case, batch, data, layer)
    starts = [sum(batch.extend_lens[:request]) for request in range(batch.num_reqs)]
    found = {}
    for mistake in mistakes(case, batch, data, layer):
        out, touched = truth.clone(), 0
        for request, rows, wrong in touched_answers(case, batch, layer, mistake):
            out[[starts[request] + row for row in rows]] = wrong
            touched += len(rows)
        if touched:
            found[mistake.name] = out
    return found


def touched_answers(
    case: Case, batch: Batch, layer: int, mistake: Mistake
) -> Iterator[tuple[int, list[int], Tensor]]:
    """(request, rows, [rows, heads, v_head_dim]) where a mistake touches rows, a few at a time."""
    for request, extend in enumerate(batch.extend_lens):
        rows = [row for row in range(extend) if mistake.touches(request, row)]
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            yield request, some, _answer_rows(case, batch, mistake, layer, request, some)


def answer(
    case: Case, batch: Batch, data: BatchData, layer: int, *, meaning: Meaning = TRUE
) -> Tensor:
    """[num_tokens, heads, v_head_dim] float64: what the oracle's `attend` gives."""
    whole = Mistake(name="", meaning=meaning, data=data, touches=lambda request, row: True)
    return torch.cat([out for _, _, out in touched_answers(case, batch, layer, whole)])


def _answer_rows(
    case: Case, batch: Batch, mistake: Mistake, layer: int, request: int, rows: list[int]
) -> Tensor:
    """[rows, heads, v_head_dim] float64 from dense scores."""
    data, meaning = mistake.data, mistake.meaning
    heads, kv_heads = case.num_heads, case.num_kv_heads
    group = heads // kv_heads
    owner = [h % kv_heads if meaning.is_striped else h // group for h in range(heads)]
    keys = data.keys[request][layer].transpose(0, 1)[owner]  # [heads, keys, head_dim]
    values = data.values[request][layer].transpose(0, 1)[owner]
    queries = data.queries[request][layer, rows].transpose(0, 1)  # [heads, rows, head_dim]
    scores = queries @ keys.transpose(1, 2) * (data.scale * meaning.key_factor)
    if case.soft_cap is not None and meaning.is_capped:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    hidden = hidden_keys(case, batch, layer, request, rows, keys.shape[1], meaning.keys)
    scores.masked_fill_(hidden, -math.inf)
    total = torch.logsumexp(scores, 2, keepdim=True)
    times = meaning.num_sinks - case.is_part
    if data.sinks is not None and times:
        sinks = data.sinks[layer] + math.log(times)
        total = torch.logaddexp(total, sinks[:, None, None])
    weights = (scores - total).exp().nan_to_num(0.0)  # a row without keys: -inf minus -inf
    return (weights @ values).transpose(0, 1) * meaning.value_factor


def hidden_keys(
    case: Case,
    batch: Batch,
    layer: int,
    request: int,
    rows: list[int],
    num_keys: int,
    keys: VisibleKeys = visible_keys,
) -> Tensor:
    """[rows, num_keys] bool: what each row may not see."""
    hidden = torch.ones(len(rows), num_keys, dtype=torch.bool)
    for place, row in enumerate(rows):
        seen = keys(case, batch, layer, request, row)
        hidden[place, torch.tensor(seen, dtype=torch.int64)] = False
    return hidden
