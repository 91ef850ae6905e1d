"""Log-probabilities of prompt tokens, computed in blocks so that no step holds all its logits.

Worked example: a step of rows [a: tokens 4..6 of a prompt of 9, b: a decode token, c: a whole
prompt of 3].

    tokens of the step      0 1 2 | 3 | 4 5 6
    position                4 5 6 | 7 | 0 1 2
    spans                   (row 0, start 0, length 3), (row 2, start 4, length 2)
    tokens scored from      0 1 2       4 5          their hidden states
    targets                 5 6 7       1 2          the position of the token behind each
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.request.sampling_params import PROMPT_BLOCK_ENTRIES
from paceline.core.step import PromptSpan
from paceline.kernels.step_view import StepView
from paceline.layers.sampling import SampledLogprobs, token_logprobs


def prompt_logprobs(
    hidden: Tensor,
    spans: Sequence[PromptSpan],
    *,
    view: StepView,
    token_ids: Tensor,
    vocab_size: int,
    logits_of: Callable[[Tensor], Tensor],
) -> SampledLogprobs:
    """Of the token behind each token of `spans`, in order: [num_scored] and [num_scored, top].

    hidden: [tokens, hidden]; token_ids: [table rows, max_tokens] int32 history; logits_of: hidden
    [n, hidden] -> [n, vocab].  Reads the device nowhere; sizes come from `spans`, so that the step
    is eager.
    """
    arange = torch.arange(hidden.shape[0], device=hidden.device)
    scored = torch.cat([arange[span.start : span.start + span.length] for span in spans])
    rows = view.row_ids.index_select(0, view.req_ids.index_select(0, scored))
    behind = rows * token_ids.shape[1] + view.positions.index_select(0, scored) + 1
    targets = token_ids.view(-1).index_select(0, behind).long()

    block = max(1, PROMPT_BLOCK_ENTRIES // vocab_size)  # rows
    top = max(span.top for span in spans)
    blocks = [
        token_logprobs(logits_of(hidden.index_select(0, where)), wanted, top=top)
        for where, wanted in zip(
            torch.split(scored, block), torch.split(targets, block), strict=True
        )
    ]
    chosen, top_ids, top_values = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return SampledLogprobs(chosen, top_ids, top_values)
