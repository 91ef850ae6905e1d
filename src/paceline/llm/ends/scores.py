"""How likely given tokens are behind a text: the prompts that are asked, and what they answer.

Completions and labels are the last tokens of a prompt, which ends in *score*: exact, whatever else
the model finds likely there.  What stands before them may come from the prefix cache.

Worked example: "the cat" and its completion " sat", where "cat s" is a token of both.

    encoded apart     the | cat         what a text is encoded as alone
    together          the | cat s | at
    scored                  cat s | at  from the first token that differs
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.errors import RequestError
from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.llm.admission import Admission, AdmittedPrompt
from paceline.llm.inputs import ChatPrompt, Ids, as_batch, as_prompt, plain_ids

Text = str | Ids
SCORED = SamplingParams(temperature=0.0, max_tokens=1, seed=0, prompt_logprobs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a completion is behind its prompt."""

    token_ids: tuple[int, ...]  # of the completion
    logprobs: tuple[float, ...]  # of each, natural, behind those before it

    @property
    def logprob(self) -> float:
        """Of the whole completion."""
        return math.fsum(self.logprobs)


def scored_prompts(
    admission: Admission, prompts: object, completions: object
) -> list[AdmittedPrompt]:
    """Each prompt with its completion behind it.  Raises RequestError."""
    given, wanted = as_batch(prompts), as_batch(completions)
    if len(given) != len(wanted):
        raise _error("completions", f"one for each of {len(given)} prompts", str(len(wanted)))
    pairs = [_joined(admission, *pair) for pair in zip(given, wanted, strict=True)]
    admitted = admission.admit_end([ids for ids, _ in pairs], End.SCORE, SCORED)
    return [
        replace(each, score_from=first) for each, (_, first) in zip(admitted, pairs, strict=True)
    ]


def _joined(admission: Admission, prompt: object, completion: object) -> tuple[list[object], int]:
    """(token ids of both, where the completion's begin)"""
    first, second = as_prompt(prompt), as_prompt(completion)
    if isinstance(first, str) and isinstance(second, str):
        encode = admission.require_tokenizer().encode
        ids, alone = encode(first + second), encode(first)
        pairs = enumerate(zip(ids, alone, strict=False))
        start = next((index for index, (a, b) in pairs if a != b), min(len(ids), len(alone)))
        joined: list[object] = [*ids]
    elif isinstance(first, list) and isinstance(second, list):
        joined, start = [*first, *second], len(first)
    else:
        raise _error("a prompt and its completion", "both texts or both token ids", "one of each")
    if start == 0 or start == len(joined):
        got = "no prompt" if start == 0 else "no completion"
        raise _error("a prompt and its completion", "at least one token each", got)
    return joined, start


def completion_scores(outputs: Sequence[RequestOutput]) -> list[Score]:
    """Of finished requests of `scored_prompts`.  Raises RequestError for one that failed."""
    found = []
    for output in outputs:
        rows = [row for row in _scores(output) if row is not None]
        ids = output.prompt_token_ids[len(output.prompt_token_ids) - len(rows) :]
        found.append(Score(token_ids=ids, logprobs=tuple(row.chosen for row in rows)))
    return found


def _scores(output: RequestOutput) -> tuple[TokenLogprobs | None, ...]:
    if output.outputs[0].error is not None:
        raise RequestError(output.outputs[0].error)
    assert output.prompt_logprobs is not None, "they were asked for"
    return output.prompt_logprobs


def label_prompts(
    admission: Admission,
    query: Text,
    items: Iterable[Text],
    label_token_ids: Ids,
    *,
    item_first: bool,
) -> list[AdmittedPrompt]:
    """[num_items * num_labels], the labels of an item together.  Raises RequestError."""
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
    admitted = admission.admit_end(prompts, End.SCORE, SCORED)
    return [replace(each, score_from=len(each.token_ids) - 1) for each in admitted]


def _labels(admission: Admission, label_token_ids: object) -> list[int]:
    """Checked here, where they are known to be labels."""
    given = as_prompt(label_token_ids)
    if isinstance(given, str | ChatPrompt) or not given:
        got = "none" if not given else type(label_token_ids).__name__
        raise _error("label_token_ids", "at least one token id", got)
    labels = plain_ids(given)
    vocab_size = admission.config.vocab_size
    for label in labels:
        if type(label) is not int or not 0 <= label < vocab_size:
            raise _error("a label token id", f"an integer from 0 to {vocab_size - 1}", repr(label))
    return list(labels)  # type: ignore[arg-type]


def label_scores(
    outputs: Sequence[RequestOutput], num_labels: int, *, apply_softmax: bool
) -> list[list[float]]:
    """[num_items][num_labels] probabilities; with apply_softmax they add up to 1."""
    found = []
    for output in outputs:
        last = _scores(output)[-1]
        assert last is not None, "a label has text before it"
        found.append(last.chosen)
    rows = [found[start : start + num_labels] for start in range(0, len(found), num_labels)]
    if apply_softmax:
        return [torch.tensor(row, dtype=torch.float64).softmax(0).tolist() for row in rows]
    return [[math.exp(value) for value in row] for row in rows]


def _error(name: str, expected: str, got: str) -> RequestError:
    remedy = "see LLM.score and LLM.score_labels"
    return RequestError.about(name, expected=expected, got=got, remedy=remedy)
