"""TokenNames: single tokens as text, for logprobs."""

from paceline.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not a character


class TokenNames:
    """What a token adds to a text.  Immutable."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # Decoders treat the first token of a text specially, so none is decoded alone.
        self._before = tokenizer.encode("a", add_special_tokens=False) if tokenizer else []
        self._text_before = self._decode(self._before)

    def text(self, *token_ids: int) -> str:
        """What they are together; empty when that is no whole characters."""
        text = self._decode([*self._before, *token_ids]).removeprefix(self._text_before)
        return "" if _REPLACEMENT in text else text

    def name(self, token_id: int) -> str:
        """Its text, or `token_id:<id>` where that is empty, so that names differ."""
        return self.text(token_id) or f"token_id:{token_id}"

    def utf8(self, token_id: int) -> list[int] | None:
        """The bytes of its text; None where that is empty."""
        return list(self.text(token_id).encode()) or None

    def _decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
