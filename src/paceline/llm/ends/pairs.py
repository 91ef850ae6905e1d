"""Scores of pairs, by models with a classifier's head: what is asked of them.

The texts of a pair are encoded at once, as the tokenizer joins them: [CLS] query [SEP] document
[SEP].  Where the model tells the second text's tokens apart, it is told where they begin.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.errors import RequestError
from paceline.core.modes import End
from paceline.llm.admission import Admission, AdmittedPrompt
from paceline.llm.inputs import as_batch, as_prompt


def pair_prompts(admission: Admission, queries: object, documents: object) -> list[AdmittedPrompt]:
    """A prompt of each pair.  queries: one for all documents, or one for each.  Raises
    RequestError, of a model that scores no pairs, too."""
    admission.require_labels()
    texts, asked = as_batch(documents), as_batch(queries)
    if len(asked) == 1:
        asked *= len(texts)
    if len(asked) != len(texts):
        expected = f"one for all, or one for each of {len(texts)} documents"
        raise _error("queries", expected, str(len(asked)))
    joined = [_joined(admission, *pair) for pair in zip(asked, texts, strict=True)]
    return admitted_pairs(admission, joined)


def admitted_pairs(
    admission: Admission, joined: Sequence[tuple[Sequence[int], int]]
) -> list[AdmittedPrompt]:
    """joined: token ids of each pair, and where its second text begins.  Raises RequestError."""
    admitted = admission.admit_end([list(ids) for ids, _ in joined], End.POOL)
    if not admission.config.tells_types:
        return admitted
    return [
        replace(each, second_from=second)
        for each, (_, second) in zip(admitted, joined, strict=True)
    ]


def _joined(admission: Admission, query: object, document: object) -> tuple[list[int], int]:
    first, second = as_prompt(query), as_prompt(document)
    if isinstance(first, str) and isinstance(second, str):
        for text in (first, second):
            admission.check_fits(text)
        return admission.require_tokenizer().encode_pair(first, second)
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second], len(first)  # type: ignore[list-item]
    raise _error("a query and its document", "both texts or both token ids", "one of each")


def _error(name: str, expected: str, got: str) -> RequestError:
    return RequestError.about(name, expected=expected, got=got, remedy="see LLM.score_pairs")
