"""StructureCompiler: grammars of the forms that answers must have, by llguidance.

A grammar of a text is made once, and requests have forks of it.  What llguidance does not know of
a JSON schema is refused by its name, never left out.  Making one gives the interpreter's lock free,
so that other threads run meanwhile; the tokenizer's own form, made once, does not (`prepare`).
"""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import RequestError
from paceline.core.request.structured import StructuredOutputs, StructureKind
from paceline.text.tokenizer import Tokenizer

_MOST_KEPT = 32  # grammars
_MAX_TOLD = 300  # characters of what llguidance says
_INSIDE = re.compile("<state>|<backtrace>")  # behind it: of its own state
# Of Lark, its texts, its regexes and its remarks; and a token's name.
_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//).*|(<[^<>\s]+>)')
_ANY_OBJECT = '{"type": "object"}'
# Between the parts of a JSON text stands a blank, or a line end and an indent: no model
# can say blanks for ever.  A schema's own "x-guidance" does not count.
_JSON_OPTIONS: Any = {"lenient": False, "whitespace_pattern": r"[ ]|\r?\n[ \t]{0,24}"}
# A mask is made between two steps: what would take tens of milliseconds ends its request instead.
_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class StructureCompiler:
    """Owns the grammars of one model's tokenizer, the last that were asked for.  Thread-safe.

    vocab_size: tokens the model's masks have, at most; end_ids: what ends an answer, allowed where
    its form is whole.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._end_ids = [token for token in end_ids if token < self._vocab_size]
        self._made: OrderedDict[StructuredOutputs, StructuredGrammar] = OrderedDict()
        self._core: Any = None  # the tokenizer's form
        self._fault: str | None = None  # why there is none
        self._lock = Lock()  # of the three above

    def prepare(self) -> str | None:
        """Make the tokenizer's form now: seconds of a large vocabulary, in which no other thread
        runs.  Returns why it cannot be made, where it cannot."""
        import llguidance

        end_ids = self._end_ids or [self._tokenizer.eos_token_id or 0]
        with self._lock:
            if self._core is None and self._fault is None:
                try:
                    self._core = llguidance.LLTokenizer(
                        llguidance.TokenizerWrapper(
                            _Vocabulary(self._tokenizer, end_ids, self._vocab_size)
                        ),
                        eos_token=end_ids,
                    )
                except Exception as error:  # noqa: BLE001  of another's reader; most ask for no form
                    self._fault = _short(str(error) or repr(error))
            return self._fault

    def knows(self, wanted: StructuredOutputs) -> bool:
        """Whether its grammar is made, and among the last that will be given up."""
        return self._kept(wanted) is not None

    def grammar(self, wanted: StructuredOutputs) -> "StructuredGrammar":
        """Raises RequestError for a text that is no grammar, or one of parts that are not known,
        and for a tokenizer that llguidance cannot read."""
        fault = self.prepare()
        if fault is not None:
            raise RequestError.about(
                "structured_outputs",
                expected="left out, as llguidance cannot read this model's tokenizer",
                got=f"{wanted.kind} ({fault})",
                remedy="ask for the form in the prompt, or another model",
            )
        found = self._kept(wanted)
        if found is not None:
            return found
        made = self._make(wanted)
        with self._lock:
            self._made[wanted] = made
            while len(self._made) > _MOST_KEPT:
                self._made.popitem(last=False)
        return made

    def _kept(self, wanted: StructuredOutputs) -> "StructuredGrammar | None":
        with self._lock:
            found = self._made.get(wanted)
            if found is not None:
                self._made.move_to_end(wanted)
            return found

    def _make(self, wanted: StructuredOutputs) -> "StructuredGrammar":
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)
        try:
            told = _told(wanted, self._tokenizer)
            matcher = llguidance.LLMatcher(self._core, told, log_level=0, limits=limits)
            fault = matcher.get_error() or " ".join(matcher.get_grammar_warnings())
        except Exception as error:  # any_to_lark raises IndexError and plain ones, too
            raise _error(wanted.kind, str(error) or repr(error)) from error
        if fault:
            raise _error(wanted.kind, fault)
        return StructuredGrammar(matcher, wanted.kind)


class _Vocabulary:
    """A model's tokens as llguidance reads them: what each adds to a text, in bytes; without text
    one of `vocab_size` that the tokenizer does not have.

    Its own reader of tokenizer.json takes every added token for one that is no text, and yet splits
    texts into them: a grammar that forces "<tool_call>" then refuses the one token that it allows.
    Here an added token is text unless it is special or ends an answer, and special ones stand for
    themselves: a text that reads like one is made of others, and so is all of a text that is not
    what its tokens add to one, as where one takes the blanks around it.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], vocab_size: int) -> None:
        import llguidance

        added = tokenizer.added_tokens
        special = {token for token, is_special in added.items() if is_special} | set(end_ids)
        self._core = llguidance.LLTokenizer(tokenizer.to_json(), slices=[])
        self.eos_token_id = end_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(special)
        self.tokens = [
            b""
            if tokenizer.token(token) is None
            else tokenizer.added_text(token).encode()
            if token in added and token not in special
            else self._core.decode_bytes([token])
            for token in range(vocab_size)
        ]
        # What stands for the name of one that is no text: greedily its reader takes none that is
        # added.
        self._others = {
            token: self._core.greedy_tokenize(tokenizer.token(token) or "")
            for token in special & added.keys()
        }

    def __call__(self, text: bytes) -> list[int]:
        whole = self._core.tokenize_bytes(text)
        found = [part for token in whole for part in self._others.get(token, [token])]
        if b"".join(self.tokens[token] for token in found) == text:
            return found
        return list(self._core.greedy_tokenize(text.decode()))


class StructuredGrammar:
    """One grammar where it stands: engine/grammar.py says what its methods are for."""

    def __init__(self, matcher: Any, kind: StructureKind) -> None:
        self._matcher = matcher
        self._kind = kind

    def fork(self) -> "StructuredGrammar":
        return StructuredGrammar(self._matcher.deep_copy(), self._kind)

    def fill(self, words: NDArray[np.int32]) -> None:
        """words: [ceil(vocab / 32)] of the model, whose vocabulary may be the smaller one."""
        told = self._matcher.compute_bitmask()
        self._require_sound()
        words[:] = np.frombuffer(told, dtype="<i4")[: len(words)]

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._require_sound()

    @property
    def is_done(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise _error(self._kind, self._matcher.get_error())


def _told(wanted: StructuredOutputs, tokenizer: Tokenizer) -> str:
    """In llguidance's words.  Raises whatever its readers do."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = wanted.kind, wanted.text
    told: str
    if kind is StructureKind.REGEX:
        told = LLMatcher.grammar_from_regex(text)
    elif kind is StructureKind.CHOICE:
        words = " | ".join(map(json.dumps, json.loads(text)))
        told = LLMatcher.grammar_from_lark(f"start: {words}")
    elif kind is StructureKind.GRAMMAR:
        told = LLMatcher.grammar_from_lark(_numbered(any_to_lark(text), tokenizer))
    else:
        schema = json.loads(_ANY_OBJECT if kind is StructureKind.JSON_OBJECT else text)
        # The two schemas that are no objects: everything, and nothing.
        schema = {} if schema is True else {"enum": []} if schema is False else schema
        told = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    return told


def _numbered(lark: str, tokenizer: Tokenizer) -> str:
    """With added tokens by number: llguidance knows by name those alone that are no text."""
    ids = {f"{tokenizer.token(token)}": token for token in tokenizer.added_tokens}
    return _LARK.sub(lambda at: f"<[{ids[at[1]]}]>" if at[1] in ids else at[0], lark)


def _error(kind: StructureKind, fault: str) -> RequestError:
    return RequestError.about(
        f"structured_outputs.{kind}",
        expected="a form that can be followed token by token",
        got=_short(fault),
        remedy="leave that part out or write it in another way",
    )


def _short(fault: str) -> str:
    """What llguidance says, without its own state."""
    told = " ".join(_INSIDE.split(fault)[0].split())
    return f"{told:.{_MAX_TOLD}}"
