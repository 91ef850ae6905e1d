"""The fewest tokens a text can become: what cannot fit is not tokenized to its end.

One token stands for at most so many bytes.  That holds where every byte of a text ends up in some
token: a tokenizer that drops blanks, or has one token for unknown words of any length, has no bound
and gets none.

A text that is within that bound and yet far too long shows it in pieces.  A cut parts a word and
begins a text anew, so pieces have more tokens than the text: of each a few are not counted, and of
the rest one half.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

_NFC_SHRINKS = 4  # times, rounded up: U+1FBE with two accents, 7 bytes, becomes U+0390, 2 bytes
_PIECE = 1 << 15  # characters, far more than those of a word
_OF_A_CUT = 8  # tokens: of the rest of a word, of a prefix
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}  # pre-tokenizers


def longest_token_bytes(core: tokenizers.Tokenizer) -> int | None:
    """How many bytes of a text in UTF-8 one token can stand for; None where no bound is known."""
    splits = list(steps_of(core.pre_tokenizer, "pretokenizers"))
    is_byte_level = any(split["type"] == "ByteLevel" for split in splits)
    shrinks = _shrinkage(core)
    added = core.get_added_tokens_decoder().values()
    if (
        shrinks is None
        or not all(map(_keeps_text, splits))
        or not _has_every_byte(core, is_byte_level)
        or any(token.lstrip or token.rstrip for token in added)  # takes blanks along, all of them
    ):
        return None
    # A byte is one character of a byte-level token.
    vocabulary = core.get_vocab(with_added_tokens=False)
    sizes = [len(token) if is_byte_level else len(token.encode()) for token in vocabulary]
    return shrinks * max(sizes + [len(token.content.encode()) for token in added])


def fewest_of_pieces(core: tokenizers.Tokenizer, text: str, enough: int) -> int:
    """Half the tokens of the pieces of `text`, read until they show `enough`."""
    found = 0
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        (read,) = core.encode_batch_fast([piece], add_special_tokens=False)  # as Tokenizer._ids
        found += max(0, len(read) - _OF_A_CUT)
        if found // 2 >= enough:
            break
    return found // 2


def steps_of(part: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """The description of a normalizer or pre-tokenizer, sequences taken apart."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step[name]
        else:
            yield step


def _keeps_text(split: Mapping[str, Any]) -> bool:
    return split["type"] in _KEEPING or split.get("behavior", "Removed") != "Removed"


def _shrinkage(core: tokenizers.Tokenizer) -> int | None:
    """How many times shorter a text's bytes can become before it is split; None: any."""
    shrinks = 1
    for step in steps_of(core.normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif step["type"] == "Replace":
            old = step["pattern"].get("String")
            if old is None or len(step["content"].encode()) < len(old.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinks


def _has_every_byte(core: tokenizers.Tokenizer, is_byte_level: bool) -> bool:
    """Whether no text is unknown."""
    if not isinstance(core.model, models.BPE):
        return False
    if is_byte_level:
        needed = pre_tokenizers.ByteLevel.alphabet()
    else:
        needed = (
            [f"<0x{byte:02X}>" for byte in range(256)] if core.model.byte_fallback else ["?" * 9]
        )
    return all(core.token_to_id(token) is not None for token in needed)
