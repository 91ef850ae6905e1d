"""Log-probabilities in the two formats of the OpenAI API."""

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.server.token_names import TokenNames, TokenTexts

UNLIKELY = -9999.0  # the OpenAI API's stand-in for minus infinity, which JSON lacks


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs | None],
    *,
    offset: int,
) -> dict[str, Any]:
    """Of /v1/completions: parallel lists; null for a text's first token, which follows nothing.

    offset: characters of the choice's text before the first of these tokens.
    """
    tokens = [names.name(token) for token in token_ids]
    return {
        "tokens": tokens,
        "token_logprobs": [None if row is None else _finite(row.chosen) for row in rows],
        "top_logprobs": [
            None if row is None else {token: _finite(row.chosen)} | _best(names, row)
            for token, row in zip(tokens, rows, strict=True)
        ],
        "text_offset": list(_offsets(names, token_ids, offset)),
    }


def _offsets(names: TokenNames, token_ids: Sequence[int], offset: int) -> Iterator[int]:
    """Where each token's text begins; the tokens of one character share its place."""
    texts = TokenTexts(names)
    for token in token_ids:
        yield offset
        offset += len(texts.of(token))


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], rows: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """Of /v1/chat/completions: one object per token."""
    content = []
    for token, row in zip(token_ids, rows, strict=True):
        best = zip(row.top_ids, row.top_values, strict=True)
        top = [_entry(names, each, value) for each, value in best]
        content.append(_entry(names, token, row.chosen) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_scores(
    names: TokenNames, rows: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """As vLLM writes prompt_logprobs: of each token {id: {logprob, rank, decoded_token}}, the
    prompt's own first; null for the first token, which follows nothing."""
    return [
        None
        if row is None
        else {
            str(token): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": names.text(token),
            }
            for token, entry in row.items()
        }
        for row in rows
    ]


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    name, utf8 = names.name(token_id), names.utf8(token_id)
    return {"token": name, "logprob": _finite(logprob), "bytes": utf8}


def _best(names: TokenNames, row: TokenLogprobs) -> dict[str, float]:
    best = zip(row.top_ids, row.top_values, strict=True)
    return {names.name(token): _finite(value) for token, value in best}


def _finite(logprob: float) -> float:
    assert logprob < 1.0, f"{logprob} is no log-probability"  # JSON would say null of NaN
    return max(logprob, UNLIKELY)
