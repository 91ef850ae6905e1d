"""Detokenizer: token ids in, text out, never half a character and never past a stop string.

Two stages.  `_TextWindow` decodes a short sliding window of tokens, so that decoders that look at
a token's neighbours see them, and holds back what the next token may still change.
`StopMatcher` holds back what may be the beginning of a stop string.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

_CONTEXT_TOKENS = 6  # of the prompt: enough for decoders that treat a leading space specially
_MAX_PENDING_TOKENS = 32  # tokens without whole text are not kept longer: work stays linear
_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes, so at most four tokens
_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not a character (yet)


class IdDecoder(Protocol):
    """The part of a tokenizer this module needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token_ids."""

    def piece(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """What a token adds to any text that ends with a whole character; None where that depends
        on the text, is not whole itself, or is nothing."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    string: str
    num_tokens: int  # output tokens up to and with the one that completed it


class Released(NamedTuple):
    """Newly stable text; after a stop there is no more."""

    text: str
    stop: StopMatch | None = None


class Detokenizer:
    """One request's text.  Feed every output token once, in order; `flush` at its end.

    The text released by any split of the tokens into pushes is the same.  With `stop`, it ends
    before the stop string that is completed first (of several completed by the same character:
    the longest), or after it with `include_stop`.  A stop string completed by one of the first
    `min_tokens` tokens is text like any other.
    """

    def __init__(
        self,
        tokenizer: IdDecoder,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._window = _TextWindow(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop)
        self._has_stops = bool(stop)
        self._min_tokens = min_tokens
        self._released: list[str] = []
        self._num_taken = 0  # pieces of it
        self._num_tokens = 0
        self._stop: StopMatch | None = None

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def take(self) -> str:
        """What has been released since the last take."""
        taken = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return taken

    @property
    def stop(self) -> StopMatch | None:
        """The stop string that ended the text, if one did."""
        return self._stop

    def push(self, token_ids: Iterable[int]) -> Released:
        """Text that became stable.  Tokens after a stop are ignored."""
        num_before = len(self._released)
        self.feed(token_ids)
        return Released("".join(self._released[num_before:]), self._stop)

    def feed(self, token_ids: Iterable[int]) -> StopMatch | None:
        """As `push`, for who reads `text` or takes: the stop string that ended the text so far."""
        for token in token_ids:
            if self._stop is not None:
                break
            self._num_tokens += 1
            text = self._window.push(token)
            if self._has_stops:
                text = self._match(text)
            if text:
                self._released.append(text)
        return self._stop

    def flush(self) -> Released:
        """The rest of the text, once no more tokens come."""
        text = ""
        if self._stop is None:
            text += self._match(self._window.flush())
        if self._stop is None:
            text += self._matcher.flush()
        if text:
            self._released.append(text)
        return Released(text, self._stop)

    def _match(self, text: str) -> str:
        enabled = self._num_tokens > self._min_tokens
        released, string = self._matcher.push(text, enabled=enabled)
        if string is not None:
            self._stop = StopMatch(string, self._num_tokens)
        return released


class StopMatcher:
    """Finds the first stop string completed in a stream of text; holds back what may become one."""

    def __init__(self, strings: tuple[str, ...], include: bool) -> None:
        self._strings = strings
        self._include = include
        self._first_characters = {string[0] for string in strings}
        self._held = ""  # the longest suffix of the text that begins a stop string

    def push(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """(text that may be shown, the stop string found or None).

        Not `enabled`: a stop string completed in this text is text like any other.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        old_length = len(self._held)
        self._held += text
        found = _first_completed(self._held, old_length, self._strings) if enabled else None
        if found is None:
            keep = begun_length(self._held, self._strings)
            return self._take(len(self._held) - keep), None
        start, string = found
        shown = self._take(start + len(string) if self._include else start)
        self._held = ""
        return shown, string

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        return self._take(len(self._held))

    def _take(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown


def _first_completed(
    text: str, old_length: int, strings: tuple[str, ...]
) -> tuple[int, str] | None:
    """(start, string) of the stop string that ends first behind text[:old_length]; the longest of
    those that end together."""
    found = ((text.find(s, max(0, old_length - len(s) + 1)), s) for s in strings)
    ends = [(start + len(string), start, string) for start, string in found if start >= 0]
    if not ends:
        return None
    _, start, string = min(ends)
    return start, string


def begun_length(text: str, strings: tuple[str, ...]) -> int:
    """Length of the longest suffix of text that is a proper prefix of a stop string."""
    longest = max((len(string) for string in strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        suffix = text[-length:]
        if any(len(string) > length and string.startswith(suffix) for string in strings):
            return length
    return 0


class _TextWindow:
    """Decodes a window of recent tokens, of whose text the first `_shown` characters are out.

    tokens[:read] is context: its text was whole when the rest came.  The window moves when the
    text is whole again; then the rest becomes the context.
    """

    def __init__(
        self, tokenizer: IdDecoder, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        # Called for every token of every request: a method of ours around it would cost as much.
        self._decode: Callable[[Sequence[int]], str] = partial(
            tokenizer.decode, skip_special_tokens=skip_special_tokens
        )
        self._piece: Callable[[int], str | None] = partial(
            tokenizer.piece, skip_special_tokens=skip_special_tokens
        )
        self._tokens = self._context_of(prompt_ids)
        self._read = len(self._tokens)
        text = self._decode(self._tokens)
        self._shown = len(_whole_part(text))
        self._is_whole = self._shown == len(text)  # nothing is held back

    def push(self, token: int) -> str:
        """The characters that `token` made stable."""
        if self._is_whole and (piece := self._piece(token)) is not None:
            self._tokens, self._read, self._shown = [token], 1, len(piece)
            return piece
        tokens, shown = self._tokens, self._shown
        tokens.append(token)
        text = self._decode(tokens)
        if len(text) > shown and not text.endswith(_REPLACEMENT):
            del tokens[: self._read]
            self._read, self._shown = len(tokens), len(self._decode(tokens))
            self._is_whole = True
            return text[shown:]
        self._is_whole = False
        whole = _whole_part(text)
        released = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if len(self._tokens) - self._read > _MAX_PENDING_TOKENS:
            released += self._cut(text) if whole != text else self._drop_silent()
        return released

    def flush(self) -> str:
        """The characters still held back."""
        text = self._decode(self._tokens)
        released = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return released

    def _context_of(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt's last few tokens, from where a character begins: a byte-fallback decoder
        gives up a whole run of bytes that begins inside one."""
        nearest = max(0, len(prompt_ids) - _CONTEXT_TOKENS)
        for start in range(nearest, max(-1, nearest - _CHARACTER_TOKENS), -1):
            tokens = list(prompt_ids[start:])
            if not self._decode(tokens).startswith(_REPLACEMENT):
                return tokens
        return list(prompt_ids[nearest:])

    def _cut(self, text: str) -> str:
        """Release text that stays broken up to a token boundary inside no character.

        Such a boundary is one where the two sides decode apart as they do together; with at most
        four bytes to a character, one of the last few is.
        """
        for start in range(len(self._tokens) - 1, len(self._tokens) - 2 * _CHARACTER_TOKENS, -1):
            before, after = self._decode(self._tokens[:start]), self._decode(self._tokens[start:])
            if after and before + after == text:
                released = before[self._shown :]
                del self._tokens[:start]
                self._read = 0
                self._shown = max(0, self._shown - len(before))
                return released
        return ""

    def _drop_silent(self) -> str:
        """Forget tokens that have no text, such as special tokens that are skipped."""
        del self._tokens[self._read :]
        return ""


def _whole_part(text: str) -> str:
    """The text without the replacement characters at its end, which further tokens may turn into
    characters: one for the whole unfinished character with byte-level decoders, one for each byte
    of an unfinished run with byte-fallback decoders.
    """
    return text.rstrip(_REPLACEMENT)
