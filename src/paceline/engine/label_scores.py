"""How likely given tokens are behind a text: the prompts that are asked, and what they answer.

The label is the prompt's last token, so its score is that of a prompt token: exact, whatever else
the model finds likely there.
"""

import math
from collections.abc import Sequence

import torch

from paceline.core.errors import RequestError, message
from paceline.engine.admission import Admission
from paceline.engine.outputs import RequestOutput

Text = str | Sequence[int]


def label_prompts(
    admission: Admission,
    query: Text,
    items: Sequence[Text],
    label_token_ids: Sequence[int],
    *,
    item_first: bool,
) -> list[list[int]]:
    """[num_items * num_labels] token ids, the labels of an item together.  Raises RequestError."""
    kinds = {isinstance(text, str) for text in (query, *items)}
    if isinstance(items, str) or len(kinds) != 1:
        raise _error("query and items", "all texts or all token ids", "some of each")
    if not label_token_ids:
        raise _error("label_token_ids", "at least one token id", "none")
    prompts = []
    for item in items:
        first, second = (item, query) if item_first else (query, item)
        if isinstance(first, str) and isinstance(second, str):
            ids = admission.require_tokenizer().encode(first + second)
        else:
            ids = [*first, *second]
        prompts += [[*ids, label] for label in label_token_ids]
    return prompts


def label_scores(
    outputs: Sequence[RequestOutput], num_labels: int, *, apply_softmax: bool
) -> list[list[float]]:
    """[num_items][num_labels] probabilities; with apply_softmax they add up to 1."""
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None, "they were asked for"
        last = output.prompt_logprobs[-1]
        assert last is not None, "a label has text before it"
        found.append(last.chosen)
    rows = [found[start : start + num_labels] for start in range(0, len(found), num_labels)]
    if apply_softmax:
        return [torch.tensor(row, dtype=torch.float64).softmax(0).tolist() for row in rows]
    return [[math.exp(value) for value in row] for row in rows]


def _error(name: str, expected: str, got: str) -> RequestError:
    remedy = "see LLM.score"
    return RequestError(message(name, expected=expected, got=got, remedy=remedy))
