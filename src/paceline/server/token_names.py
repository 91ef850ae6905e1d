"""TokenNames: single tokens as text, for logprobs."""

from paceline.text.tokenizer import Tokenizer


class TokenNames:
    """What a token adds to a text.  Immutable."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, *token_ids: int) -> str:
        """What they are together; empty when that is no whole characters."""
        return "" if self._tokenizer is None else self._tokenizer.added_text(*token_ids)

    def name(self, token_id: int) -> str:
        """Its text, or `token_id:<id>` where that is empty, so that names differ."""
        return self.text(token_id) or f"token_id:{token_id}"

    def utf8(self, token_id: int) -> list[int] | None:
        """The bytes of its text; None where that is empty."""
        return list(self.text(token_id).encode()) or None
