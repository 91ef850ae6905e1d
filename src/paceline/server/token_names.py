"""TokenNames: single tokens as text, for logprobs."""

from paceline.text.tokenizer import Tokenizer

_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes, so at most four tokens


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


class TokenTexts:
    """Owns how far the text of consecutive tokens is told: the last token of a character has it."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._begun: list[int] = []  # tokens of a character that is not whole

    def of(self, token_id: int) -> str:
        """What the next token brings."""
        self._begun.append(token_id)
        text = self._names.text(*self._begun)
        if text or len(self._begun) == _CHARACTER_TOKENS:
            self._begun.clear()
        return text
