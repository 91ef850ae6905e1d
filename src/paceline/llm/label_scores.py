"""How likely given tokens are behind a text: the prompts that are asked, and what they answer.

The label is the prompt's last token, so its score is that of a prompt token: exact, whatever else
the model finds likely there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from paceline.core.errors import RequestError
from paceline.engine.outputs import RequestOutput
from paceline.llm.admission import Admission
from paceline.llm.inputs import Conversation, Ids, as_prompt

Text = str | Ids


def label_prompts(
    admission: Admission,
    query: Text,
    items: Iterable[Text],
    label_token_ids: Ids,
    *,
    item_first: bool,
) -> list[list[int]]:
    """[num_items * num_labels] token ids, the labels of an item together.  Raises RequestError."""
    if isinstance(items, str | Mapping) or not isinstance(items, Iterable):
        raise _error("items", "several texts, or several lists of token ids", type(items).__name__)
    asked, *texts = [as_prompt(text) for text in (query, *items)]
    if len({isinstance(text, str) for text in (asked, *texts)}) != 1:
        raise _error("query and items", "all texts or all token ids", "some of each")
    labels = _labels(admission, label_token_ids)
    prompts = []
    for text in texts:
        first, second = (text, asked) if item_first else (asked, text)
        if isinstance(first, str) and isinstance(second, str):
            ids = admission.require_tokenizer().encode(first + second)
        else:
            ids = [*first, *second]  # type: ignore[misc]
        if not ids:
            raise _error("query and item", "at least one token together", "none")
        prompts += [[*ids, label] for label in labels]
    return prompts


def _labels(admission: Admission, label_token_ids: object) -> list[int]:
    """Checked here, where they are known to be labels."""
    labels = as_prompt(label_token_ids)
    if isinstance(labels, str | Conversation) or not labels:
        got = "none" if not labels else type(label_token_ids).__name__
        raise _error("label_token_ids", "at least one token id", got)
    vocab_size = admission.config.vocab_size
    for label in labels:
        if type(label) is not int or not 0 <= label < vocab_size:
            raise _error("a label token id", f"an integer from 0 to {vocab_size - 1}", repr(label))
    return labels  # type: ignore[return-value]


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
    return RequestError.about(name, expected=expected, got=got, remedy=remedy)
