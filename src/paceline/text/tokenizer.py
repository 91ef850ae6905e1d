"""Tokenizer: the owner of a model's tokenizer.json, its special tokens and its chat template."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from paceline.core.errors import ConfigError, ModelError, RequestError, message
from paceline.core.events import Event, Notify
from paceline.core.lfs import LFS_POINTER, LFS_REMEDY, is_lfs_pointer
from paceline.text.chat_template import ChatTemplate
from paceline.text.fewest_tokens import fewest_of_pieces, longest_token_bytes, steps_of

UNUSABLE_TEMPLATE = "chat_template_unusable"  # reason code
_MOST_KEPT = 1 << 16  # texts of single tokens
_BYTES_THAT_FIT = 8  # for each token that is enough: a longer text is worth a look at its beginning
_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not a character


class Tokenizer:
    """Text to ids and back.  Immutable; safe to share between threads."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        *,
        chat_template: str | None = None,
    ) -> None:
        """core: the tokenizer proper; config: the content of tokenizer_config.json."""
        self._core = core
        self._special_tokens = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (token := _token_text(config.get(name))) is not None
        }
        self._add_bos: bool | None = config.get("add_bos_token")
        self._decode_one = lru_cache(_MOST_KEPT)(self._decode_alone)
        self._pieces = {  # by whether special tokens are skipped: asked for every token
            skips: lru_cache(_MOST_KEPT)(partial(self._find_piece, skip_special_tokens=skips))
            for skips in (False, True)
        }
        # Its texts are the tokens' bytes, one behind the other; others look at neighbours.
        self._joins_bytes = isinstance(core.decoder, tokenizers.decoders.ByteLevel)
        # Decoders treat the first token of a text specially, so none is decoded alone.
        self._before = list(core.encode("a", add_special_tokens=False).ids)
        self._text_before = self.decode(self._before, skip_special_tokens=False)
        self._template: ChatTemplate | None = None
        self.chat_template_fault: str | None = None  # why it cannot be used: text does not need it
        if chat_template is not None:
            try:
                self._template = ChatTemplate(chat_template)
            except ConfigError as error:
                self.chat_template_fault = str(error)

    @classmethod
    def from_folder(cls, folder: str | Path, *, lowers: bool = False) -> "Tokenizer":
        """Read tokenizer.json, and where they exist tokenizer_config.json and the chat template.

        lowers: texts, as sentence-transformers does where a file of its asks for it.
        Raises ModelError when there is no tokenizer.json or a file cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError.about(
                "tokenizer",
                expected="tokenizer.json in the model folder",
                got=f"{folder} without it",
                remedy="save the model with a fast tokenizer, or pass token ids",
            )
        # Its thread pool does not survive a fork, and one prompt is too short to gain from it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise _unreadable(path, "a tokenizer in the tokenizers format", error) from error
        core.no_padding()
        core.no_truncation()
        own = [] if core.normalizer is None else [core.normalizer]
        steps = steps_of(core.normalizer, "normalizers")
        if lowers and not any(step["type"] == "Lowercase" for step in steps):
            core.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        config = _read_json(folder / "tokenizer_config.json")
        return cls(core, config, chat_template=_find_chat_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Ids below this one exist here; a model's embedding may be padded beyond."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def tokens(self) -> dict[int, str]:
        """What each id stands for."""
        return {index: token for token, index in self._core.get_vocab(True).items()}

    @property
    def added_tokens(self) -> dict[int, bool]:
        """Tokens that a text is split into before all others, and whether each is special."""
        found = self._core.get_added_tokens_decoder()
        return {index: bool(token.special) for index, token in found.items()}

    def to_json(self) -> str:
        """The content of a tokenizer.json that makes the same tokens."""
        return self._core.to_str()

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token; the model's configuration may name more."""
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        """Whether there is one that can be used."""
        return self._template is not None

    def require_chat_template(self) -> ChatTemplate:
        """Raises ModelError where there is none, or one that cannot be used."""
        if self._template is not None:
            return self._template
        raise ModelError(
            self.chat_template_fault
            or message(
                "chat",
                expected="sent to a model with a chat template",
                got="one without",
                remedy="use plain prompts, or a model tuned for chat",
            )
        )

    def token(self, token_id: int) -> str | None:
        """What an id stands for in the vocabulary; None for an id without a token."""
        token: str | None = self._core.id_to_token(token_id)
        return token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids.  With special tokens: those the model's configuration puts around a prompt,
        and never a second begin token before a text that starts with one.

        Raises RequestError when text is not a string that UTF-8 can hold.
        """
        _check_text(text)
        if not add_special_tokens or self._add_bos is False:
            return self._ids(text, add_special_tokens=False)
        return self._begun(self._ids(text, add_special_tokens=True))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """(token ids of both with what the tokenizer puts between and around them, the first that
        is of the second type; their number where it has one type).  It begins as what `encode`
        makes, which raises the same."""
        for text in (first, second):
            _check_text(text)
        pair, special = (first, second), self._add_bos is not False
        (found,) = self._core.encode_batch_fast([pair], add_special_tokens=special)
        plain, types = list(found.ids), found.type_ids
        ids = self._begun(plain) if special else plain
        second_from = types.index(1) if 1 in types else len(types)
        return ids, second_from + len(ids) - len(plain)

    def _begun(self, ids: list[int]) -> list[int]:
        """With the begin token where the model's configuration asks for it, and never twice."""
        bos = self.bos_token_id
        if bos is None:
            return ids
        if ids[:2] == [bos, bos]:
            return ids[1:]
        return [bos, *ids] if self._add_bos and ids[:1] != [bos] else ids

    def fewest_tokens(self, text: str, enough: int) -> int:
        """How many tokens `text` has at least; no more of it is read than shows that they are
        `enough`.  0 where nothing is known, which its length alone shows of most texts that fit.
        """
        most, num_bytes = self._longest_token_bytes, len(text.encode(errors="replace"))
        fewest = 0 if most is None else -(-num_bytes // most)
        if fewest >= enough or num_bytes <= _BYTES_THAT_FIT * enough:
            return fewest
        return max(fewest, fewest_of_pieces(self._core, text, enough))

    @cached_property
    def _longest_token_bytes(self) -> int | None:
        return longest_token_bytes(self._core)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As a batch of one: `encode` would keep other threads from running meanwhile."""
        (found,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token_ids; ids without a token have none."""
        if len(token_ids) == 1:  # what text goes on behind: asked for every token of every request
            return self._decode_one(token_ids[0], skip_special_tokens)
        return self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _decode_alone(self, token_id: int, skip_special_tokens: bool) -> str:
        return self._core.decode([token_id], skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """What a token adds to any text that ends with a whole character; None where that depends
        on the text, is not whole itself, or is nothing."""
        return self._pieces[skip_special_tokens](token_id)

    def _find_piece(self, token_id: int, skip_special_tokens: bool) -> str | None:
        if not self._joins_bytes:
            return None
        text = self._decode_one(token_id, skip_special_tokens)
        return text if text and _REPLACEMENT not in text else None

    def added_text(self, *token_ids: int) -> str:
        """What tokens add to a text, special ones too; empty when that is no whole characters."""
        text = self.decode([*self._before, *token_ids], skip_special_tokens=False)
        added = text.removeprefix(self._text_before)
        return "" if _REPLACEMENT in added else added

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation, special tokens included.

        messages: [{"role": ..., "content": ...}, ...]; variables are passed to the template.
        Raises as `require_chat_template` does, and RequestError when it refuses the messages.
        """
        return self.require_chat_template().render(
            messages,
            self._special_tokens | variables | {"add_generation_prompt": add_generation_prompt},
        )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation.  The template alone decides on special tokens, so no second
        begin token is added.  Raises as `render_chat` does.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._core.token_to_id(token)


def find_tokenizer(file: Path | None, notify: Notify, *, lowers: bool = False) -> Tokenizer | None:
    """The tokenizer of a tokenizer.json; None for a model without, which takes token ids.  lowers:
    as of `Tokenizer.from_folder`.

    A chat template that cannot be used is an event: text does not need it.  Raises ModelError for
    files that cannot be read.
    """
    if file is None:
        return None
    tokenizer = Tokenizer.from_folder(file.parent, lowers=lowers)
    if tokenizer.chat_template_fault is not None:
        notify(Event(UNUSABLE_TEMPLATE, tokenizer.chat_template_fault))
    return tokenizer


def missing_tokenizer(folder: Path | None) -> str | None:
    """Why a model's folder that brings a tokenizer has none that is read; None for one that has, or
    brings none."""
    if folder is None or (folder / "tokenizer.json").is_file():
        return None
    if not (folder / "tokenizer.model").is_file():
        return None
    return message(
        "tokenizer",
        expected="tokenizer.json in the model folder",
        got="tokenizer.model alone",
        remedy="save the model with a fast tokenizer, or pass token ids",
    )


def _token_text(value: object) -> str | None:
    """A special token is written as its text, or as an object with its text as `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _check_text(text: object) -> None:
    remedy = "pass str; token ids go in as a list of ints"
    if not isinstance(text, str):
        raise RequestError.about(
            "prompt", expected="a string", got=type(text).__name__, remedy=remedy
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"a lone surrogate at index {error.start}"
        remedy = "decode the source with errors='replace'"
        raise RequestError.about(
            "prompt", expected="valid Unicode", got=got, remedy=remedy
        ) from error


def _find_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, then chat_template.json, then tokenizer_config.json's field, where a
    list of named templates means the one called `default`."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return _read_text(jinja)
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise _unreadable(path, "valid JSON", error) from error
    if not isinstance(content, dict):
        raise _unreadable(path, "a JSON object", type(content).__name__)
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, "text in UTF-8", error) from error


def _unreadable(path: Path, expected: str, got: object) -> ModelError:
    remedy = "restore the file from the model's source"
    if is_lfs_pointer(path):
        got, remedy = LFS_POINTER, LFS_REMEDY
    return ModelError.about(str(path), expected=expected, got=got, remedy=remedy)
