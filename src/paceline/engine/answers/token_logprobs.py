"""TokenLogprobs: the log-probabilities of one place of a text, with the tokens' text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.step import RowLogprobs
from paceline.text.tokenizer import Tokenizer


class Logprob(NamedTuple):
    """One token at one place."""

    logprob: float  # natural log, of the model's raw distribution
    rank: int | None  # 1 is the most likely; None: below the most likely ones that are told
    decoded_token: str  # what it adds to a text; empty where that is no whole character, or
    # without a tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs(Mapping[int, Logprob]):
    """The token of one place, sampled or of the prompt, and the most likely ones there.

    Also a mapping from token ids to their Logprob: the place's own token first.  Texts are decoded
    when they are asked for.
    """

    token_id: int
    chosen: float  # of token_id
    top_ids: tuple[int, ...]  # most likely first
    top_values: tuple[float, ...]
    tokenizer: Tokenizer | None = field(compare=False, repr=False)

    @classmethod
    def of(cls, token_id: int, row: RowLogprobs, tokenizer: Tokenizer | None) -> "TokenLogprobs":
        return cls(
            token_id=token_id,
            chosen=row.chosen,
            top_ids=row.top_ids,
            top_values=row.top_values,
            tokenizer=tokenizer,
        )

    @property
    def token(self) -> str:
        """What token_id adds to a text; empty where that is no whole character."""
        return self._text(self.token_id)

    def __getitem__(self, token_id: int) -> Logprob:
        text = self._text(token_id)
        if token_id in self.top_ids:
            place = self.top_ids.index(token_id)
            return Logprob(self.top_values[place], place + 1, text)
        if token_id != self.token_id:
            raise KeyError(token_id)
        return Logprob(self.chosen, None, text)

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys((self.token_id, *self.top_ids)))

    def __len__(self) -> int:
        return len({self.token_id, *self.top_ids})

    def as_document(self) -> dict[str, Any]:
        """The JSON object {token_id, token, chosen, top_ids, top_tokens, top_values}."""
        return {
            "token_id": self.token_id,
            "token": self.token,
            "chosen": self.chosen,
            "top_ids": list(self.top_ids),
            "top_tokens": [self._text(token) for token in self.top_ids],
            "top_values": list(self.top_values),
        }

    def _text(self, token_id: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.added_text(token_id)
