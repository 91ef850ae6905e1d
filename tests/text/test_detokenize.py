"""Streamed text is the decoded text, in whole characters, and ends where a stop string begins."""

from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.text.detokenize import Detokenizer, Released, StopMatch
from paceline.text.tokenizer import Tokenizer

CORPUS = [
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "naïve café, Überraschung, señor; Привет мир; 你好，世界; こんにちは; 😀🎉👩‍👩‍👧",
    "END stop STOP </s> ###",
]
SPECIAL = "<|end|>"


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return Tokenizer(core, {})


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece-style pieces with byte fallback, as of Llama 2 and Gemma."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeé你", "▁a", "bc"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("b", "c")]
    core = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(core, {})


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[Released]:
    """Push ids split at `cuts`, then flush."""
    bounds = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    pushed = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)]
    return [*pushed, detokenizer.flush()]


def _joined(released: list[Released]) -> str:
    return "".join(part.text for part in released)


texts = st.one_of(st.text(max_size=60), st.text(alphabet="aé你😀\u200d ️", max_size=40))
cuts = st.lists(st.integers(0, 150), max_size=12)


@given(text=texts, cuts=cuts)
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_the_decoded_text(text, cuts):
    tokenizer = byte_level()
    ids = _encode(tokenizer, text)
    released = _stream(Detokenizer(tokenizer, ()), ids, cuts)
    assert _joined(released) == tokenizer.decode(ids) == text


@given(ids=st.lists(st.integers(0, 399), max_size=150), cuts=cuts, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_streamed_garbage_is_the_decoded_garbage(ids, cuts, skip):
    """Any ids: bytes that form no character, special tokens, ids without a token."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=skip)
    released = _stream(detokenizer, ids, cuts)
    assert _joined(released) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.text == _joined(released)


class _ByteTokens:
    """A decoder whose tokens are any bytes, as a byte-level vocabulary may hold."""

    TOKENS = (
        b"\xff",
        b"a\xff",
        b"a",
        b"",
        b"\xe2",
        b"\x82",
        b"\xf0\x9f",
        b"\x98",
        b"\x80",
        b"\x80a",
    )

    def decode(self, token_ids, *, skip_special_tokens=True):
        data = b"".join(self.TOKENS[token] for token in token_ids)
        return data.decode("utf-8", errors="replace")

    def piece(self, token_id, *, skip_special_tokens=True):
        text = self.decode([token_id])
        return text if text and "\ufffd" not in text else None


byte_tokens = st.integers(0, len(_ByteTokens.TOKENS) - 1)


@given(
    repeated=byte_tokens,
    times=st.integers(0, 80),
    rest=st.lists(byte_tokens, max_size=40),
    cuts=cuts,
)
@settings(max_examples=400, deadline=None)
def test_long_runs_of_broken_bytes_are_the_decoded_bytes(repeated, times, rest, cuts):
    ids = [repeated] * times + rest
    decoder = _ByteTokens()
    assert _joined(_stream(Detokenizer(decoder, ()), ids, cuts)) == decoder.decode(ids)


@pytest.mark.parametrize("character", [(4, 5, 8), (6, 7, 8), (4, 5, 9)])
def test_a_character_after_broken_bytes_is_whole_wherever_the_window_is_cut(character):
    decoder = _ByteTokens()
    for times in range(80):
        ids = [0] * times + list(character)
        released = _stream(Detokenizer(decoder, ()), ids, list(range(100)))
        assert _joined(released) == decoder.decode(ids)


@cache
def _byte_letters() -> dict[int, str]:
    """The letter byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


@given(text=texts.filter(lambda text: "\ufffd" not in text))
@settings(max_examples=100, deadline=None)
def test_no_release_holds_half_a_character(text):
    tokenizer = byte_level()
    released = _stream(Detokenizer(tokenizer, ()), _encode(tokenizer, text), list(range(300)))
    assert all("\ufffd" not in part.text for part in released)
    assert released[-1].text == ""


@given(text=st.text(alphabet="abc é你😀ßж", max_size=40), cuts=cuts)
@settings(max_examples=150, deadline=None)
def test_byte_fallback_text_is_the_decoded_text(text, cuts):
    tokenizer = byte_fallback()
    ids = _encode(tokenizer, text)
    released = _stream(Detokenizer(tokenizer, ()), ids, cuts)
    assert _joined(released) == tokenizer.decode(ids)


@given(prompt=st.text(alphabet="abc é😀", max_size=12), text=st.text(alphabet="a é😀", max_size=12))
@settings(max_examples=100, deadline=None)
def test_text_continues_the_prompt(prompt, text):
    """A leading space that decoders strip from the beginning of a text is kept inside it, and a
    character that a byte-level prompt leaves unfinished appears where it is completed."""
    for tokenizer in (byte_level(), byte_fallback()):
        ids = _encode(tokenizer, prompt + text)
        for split in range(len(ids) + 1):
            before = tokenizer.decode(ids[:split]).rstrip("\ufffd")
            if tokenizer is byte_fallback() and before != tokenizer.decode(ids[:split]):
                continue
            released = _stream(Detokenizer(tokenizer, ids[:split]), ids[split:], [1, 2, 3])
            assert before + _joined(released) == tokenizer.decode(ids)


def test_a_leading_space_survives_skipped_special_tokens():
    tokenizer = byte_fallback()
    prompt, silent = _encode(tokenizer, "a"), [100_000] * 100
    ids = [*silent, *_encode(tokenizer, "a")]
    assert _joined(_stream(Detokenizer(tokenizer, prompt), ids, list(range(200)))) == " a"


class _CountingDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id, *, skip_special_tokens=True):
        return self.tokenizer.piece(token_id, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("letter", [chr(0xFF), "a", SPECIAL])
def test_work_is_linear_in_the_tokens(letter):
    token = byte_level()._core.token_to_id(letter)
    decoder = _CountingDecoder(byte_level())
    detokenizer = Detokenizer(decoder, ())
    for _ in range(2000):
        detokenizer.push([token])
    assert decoder.num_decoded < 2000 * 60


def _offline_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Character by character: (end, string) of the stop string completed first, the longest."""
    for end in range(1, len(text) + 1):
        completed = [s for s in stop if text[:end].endswith(s)]
        if completed:
            return end, max(completed, key=len)
    return None


stops = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), max_size=4, unique=True)


@given(
    text=st.text(alphabet="abé😀", max_size=30),
    stop=stops.map(tuple),
    cuts=cuts,
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stop_strings_equal_an_offline_search(text, stop, cuts, include):
    tokenizer = byte_level()
    ids = _encode(tokenizer, text)
    detokenizer = Detokenizer(tokenizer, (), stop=stop, include_stop=include)
    released = _stream(detokenizer, ids, cuts)
    found = _offline_stop(text, stop)
    if found is None:
        assert detokenizer.stop is None
        assert _joined(released) == text
        return
    end, string = found
    assert _joined(released) == text[: end if include else end - len(string)]
    stable = [len(tokenizer.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids) + 1)]
    num_tokens = next(n for n, length in enumerate(stable) if length >= end)
    assert detokenizer.stop == StopMatch(string, num_tokens)


@given(
    text=st.text(alphabet="ab", max_size=30),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 20),
    cuts=cuts,
)
@example(text="aba", stop=["ab", "abb"], min_tokens=2, cuts=[])  # held: it may become the longer
@settings(max_examples=200, deadline=None)
def test_no_stop_string_completed_within_min_tokens_ends_the_text(text, stop, min_tokens, cuts):
    tokenizer = byte_level()
    letters = [tokenizer._core.token_to_id(letter) for letter in text]  # one token a character
    detokenizer = Detokenizer(tokenizer, (), stop=tuple(stop), min_tokens=min_tokens)
    released = _joined(_stream(detokenizer, letters, cuts))
    ends = [
        (end, -len(s), s)
        for end in range(min_tokens + 1, len(text) + 1)
        for s in stop
        if text[:end].endswith(s)
    ]
    if not ends:
        assert (released, detokenizer.stop) == (text, None)
        return
    end, _, string = min(ends)
    assert released == text[: end - len(string)]
    assert detokenizer.stop == StopMatch(string, end)


def test_what_may_become_a_stop_string_is_held_until_resolved():
    tokenizer = byte_level()
    e, n, d, x = (tokenizer._core.token_to_id(letter) for letter in "ENDx")
    detokenizer = Detokenizer(tokenizer, (), stop=("END",))
    assert [detokenizer.push([token]).text for token in (x, e, n, x)] == ["x", "", "", "ENx"]
    assert detokenizer.push([e, n]) == Released("")
    assert detokenizer.push([d]) == Released("", StopMatch("END", 7))
    assert detokenizer.push([x]) == Released("", StopMatch("END", 7))
    assert detokenizer.text == "xENx"


def test_flush_releases_what_was_held():
    tokenizer = byte_level()
    ids = [tokenizer._core.token_to_id(letter) for letter in ("E", "N", _byte_letters()[0xE2])]
    detokenizer = Detokenizer(tokenizer, (), stop=("END",))
    assert detokenizer.push(ids) == Released("")
    assert detokenizer.flush() == Released("EN\ufffd")
    assert detokenizer.flush() == Released("")


@pytest.mark.parametrize("stop", [("N", "EN", "D"), ("EN", "N")])
def test_of_stop_strings_that_end_together_the_longest_ends_the_text(stop):
    tokenizer = byte_level()
    x, e, n = (tokenizer._core.token_to_id(letter) for letter in "xEN")
    detokenizer = Detokenizer(tokenizer, (), stop=stop)
    detokenizer.push([x, e, n])
    assert (detokenizer.text, detokenizer.stop) == ("x", StopMatch("EN", 3))
