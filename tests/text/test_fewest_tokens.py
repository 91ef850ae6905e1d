"""Texts that cannot fit are known by their bytes; no tokenizer does with fewer tokens."""

import unicodedata
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

import paceline
from paceline.core.errors import RequestError
from paceline.core.modes import End
from paceline.llm.admission import Admission
from paceline.llm.inputs import ChatPrompt
from paceline.text import fewest_tokens
from paceline.text.fewest_tokens import fewest_of_pieces, longest_token_bytes
from paceline.text.tokenizer import Tokenizer

BUNDLED = Path(paceline.__file__).parent / "models/bundled/tokenizer.json"
COMPOSING = (
    *range(0x3400),
    *range(0xF900, 0x12000),
    *range(0x1D000, 0x1D200),
    *range(0x2F800, 0x2FA20),
)
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def bounded(make):
    core = make()
    return core, longest_token_bytes(core)


def bundled():
    return tokenizers.Tokenizer.from_file(str(BUNDLED))


def of_vocabulary(tokens, merges=(), **more):
    return tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges), **more
        )
    )


def byte_level():
    core = of_vocabulary([*ALPHABET, "ab", "abab"], [("a", "b"), ("ab", "ab")])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return core


def composing():
    core = byte_level()
    core.normalizer = normalizers.NFC()
    return core


def blanks_as_words():
    """As models of the SentencePiece kind are saved."""
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a")]
    core = of_vocabulary(
        [*BYTES, "▁", "a", "▁▁", "▁▁▁▁", "▁a"], merges, byte_fallback=True, fuse_unk=True
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return core


@pytest.mark.parametrize(
    ("make", "most"), [(byte_level, 4), (composing, 16), (blanks_as_words, 12)]
)
@given(text=st.text(st.sampled_from("ab  \n\u1fbe\u0308\u212a\u1100\u1161\u11a8e\u0301𝄞")))
@example(text="\u1fbe\u0308\u0301" * 40)
@example(text="abab" * 40)
@example(text=" " * 40)
def test_no_text_has_fewer_tokens_than_its_bytes_say(make, most, text):
    core, found = bounded(make)
    assert found == most
    assert len(core.encode(text, add_special_tokens=False).ids) * most >= len(text.encode())


@given(text=st.text())
@example(text=" " * 1000)
@example(text="<|endoftext|>" * 10)
def test_the_bundled_tokenizer_has_a_bound(text):
    core, most = bounded(bundled)
    assert len(core.encode(text, add_special_tokens=False).ids) * most >= len(text.encode())


def test_composing_makes_a_text_a_quarter_at_most():
    """Of every character: the longest texts that become it, part by part."""
    longest = {}
    for code in COMPOSING:
        composed = unicodedata.normalize("NFC", chr(code))
        if len(composed) == 1:
            longest[composed] = max(longest.get(composed, 0), len(chr(code).encode()))
    for char in list(longest):
        parts = unicodedata.normalize("NFD", char)
        if unicodedata.normalize("NFC", char) == char:
            size = sum(longest.get(part, len(part.encode())) for part in parts)
            assert max(size, longest[char]) <= 4 * len(char.encode()), hex(ord(char))


def test_an_added_token_counts_with_all_its_bytes():
    core = byte_level()
    core.add_tokens(["<é:long>"])
    assert longest_token_bytes(core) == len("<é:long>".encode())


WORDS = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))


def stripping():
    core = byte_level()
    core.add_tokens([AddedToken("<x>", lstrip=True)])
    return core


def with_pre_tokenizer(pre_tokenizer):
    core = byte_level()
    core.pre_tokenizer = pre_tokenizer
    return core


def with_normalizer(normalizer):
    core = byte_level()
    core.normalizer = normalizer
    return core


@pytest.mark.parametrize(
    "make",
    [
        stripping,
        lambda: with_pre_tokenizer(pre_tokenizers.Whitespace()),
        lambda: with_pre_tokenizer(pre_tokenizers.Split(" ", "removed")),
        lambda: with_pre_tokenizer(None),
        lambda: with_normalizer(normalizers.Strip()),
        lambda: with_normalizer(normalizers.NFKC()),
        lambda: with_normalizer(normalizers.Replace("  ", " ")),
        lambda: with_normalizer(normalizers.Replace(tokenizers.Regex(" +"), " ")),
        lambda: of_vocabulary([*BYTES[1:], "a"], byte_fallback=True),
        lambda: of_vocabulary(["<unk>", "a"], unk_token="<unk>", fuse_unk=True),
        lambda: tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    ],
)
def test_a_tokenizer_that_drops_text_has_no_bound(make):
    assert longest_token_bytes(make()) is None


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * 10_000,
        {"prompt": "x" * 10_000},
        ChatPrompt(messages=[{"role": "u", "content": "x"}]),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch, prompt):
    template = "{{ 'x' * 10000 }}"
    tokenizer = Tokenizer(bundled(), {}, chat_template=template)
    monkeypatch.delattr(Tokenizer, "encode")
    admission = Admission(
        config=SimpleNamespace(vocab_size=4096, ends=frozenset({End.GENERATE})),
        tokenizer=tokenizer,
        processors=(),
        context_len=64,
        notify=[].append,
    )
    fewest = tokenizer.fewest_tokens("x" * 10_000, 64)
    assert fewest > 64
    text = rf"prompt must be 1 to 63 tokens \(.*\), got a text of at least {fewest} tokens; shorten"
    with pytest.raises(RequestError, match=text):
        admission.admit(prompt)


@pytest.mark.parametrize("make", [bundled, blanks_as_words, stripping, lambda: WORDS])
@pytest.mark.parametrize(
    "text", ["x" * 999, " " * 999, "abab" * 250, "a b\n" * 250, "\u1fbe\u0308\u0301𝄞" * 250]
)
@pytest.mark.parametrize("piece", [16, 17, 100])
def test_no_text_has_fewer_tokens_than_its_pieces_say(monkeypatch, make, text, piece):
    monkeypatch.setattr(fewest_tokens, "_PIECE", piece)
    core = make()
    assert fewest_of_pieces(core, text, 10**6) <= len(core.encode(text).ids)


class Counting:
    """A tokenizer that counts the characters it has read."""

    def __init__(self):
        self.num_read = 0

    def encode_batch_fast(self, texts, *, add_special_tokens):
        self.num_read += sum(map(len, texts))
        return bundled().encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def test_a_text_far_too_long_is_read_no_further_than_shows_it():
    core, text = Counting(), "hello world, " * 200_000
    assert fewest_of_pieces(core, text, 5_000) >= 5_000
    assert core.num_read < 65_537


def test_without_a_bound_by_bytes_a_long_text_is_read_in_pieces_alone():
    core = bundled()
    core.normalizer = normalizers.NFKC()
    tokenizer = Tokenizer(core, {})
    assert tokenizer.fewest_tokens("hello world, " * 200, 1_000) == 0
    assert tokenizer.fewest_tokens("hello world, " * 20_000, 1_000) >= 1_000
