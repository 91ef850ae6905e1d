"""What a large body holds is counted before it is built: a list of two million texts is not read to
be refused for its length.

The fields of the body are told apart, which builds nothing, and are looked at as bytes.  What goes
on has each field once.
"""

import re
from dataclasses import dataclass
from functools import cache

import msgspec
from msgspec import UNSET, Raw

from paceline.core.request.sampling_params import require_possible
from paceline.server.bodies.refusals import Wire, refusals_of
from paceline.server.bodies.wire import mixed_prompts
from paceline.server.errors import ApiError

_MOST_BYTES = 1 << 19  # of a field that is no prompt; 32 stop strings of 1,024 characters fit
_PROMPTS = {"input", "instructions", "messages", "prompt", "system"} | {
    *("documents", "query", "text_1", "text_2")
}  # as long as a body may be
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_FIRST = re.compile(rb"\[[ \t\n\r]*(.)")
_BLANKS = b" \t\n\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What no request may exceed."""

    context_len: int  # tokens of a prompt and its answer
    max_open: int  # completions at once

    def require_tokens(self, num_tokens: int, *, param: str, answer: int | None, got: str) -> None:
        """Raise ApiError, 400, unless a prompt leaves room for its answer.

        answer: tokens of it that were asked for, 0: none; got: how the prompt's are told.
        """
        if num_tokens + (1 if answer is None else answer) > self.context_len:
            asked = f" and {answer} to generate" if answer else ""
            asked = " and at least 1 more" if answer is None else asked
            remedy = "shorten it or ask for fewer tokens" if answer else "shorten it: it is not cut"
            raise ApiError.about(
                param,
                expected=f"within the context of {self.context_len} tokens",
                got=f"{got}{asked}",
                remedy=remedy,
                param=param,
                code="context_length_exceeded",
            )


def counted(kind: type[Wire], body: bytes, room: Room) -> bytes:
    """The same object with each field once.

    Raises ApiError or RequestError for a field that holds too much, and what msgspec raises for one
    that is unknown and for what is no JSON.
    """
    fields = msgspec.json.decode(body, type=_as_bytes(kind))
    found = {name: getattr(fields, name) for name in fields.__struct_fields__}
    sent = {name: value for name, value in found.items() if value is not UNSET}
    for name in sent.keys() - refusals_of(kind).keys() - _PROMPTS:
        _require_few_bytes(name, len(sent[name]))
    for name in kind.counted_fields:
        if name in sent:
            _count_prompts(bytes(sent[name]), room, name)
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), sent[name]) for name in sent)


@cache
def _as_bytes(kind: type[Wire]) -> type[msgspec.Struct]:
    """A struct with the fields of `kind`, of which nothing is built."""
    fields = [(name, Raw | msgspec.UnsetType, UNSET) for name in kind.__struct_fields__]
    return msgspec.defstruct(f"{kind.__name__}Bytes", fields, forbid_unknown_fields=True)


def _require_few_bytes(name: str, num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        expected, remedy = f"at most {_MOST_BYTES} bytes", "send less in it"
        raise ApiError.about(name, expected=expected, got=num_bytes, remedy=remedy, param=name)


def _count_prompts(prompt: bytes, room: Room, name: str) -> None:
    """By the kind of its first item.  Raises for too many, and for a text among ids."""
    first = _FIRST.match(prompt)
    if first is None:
        return
    if first[1] == b'"':
        _count_texts(prompt, room, name)
        return
    brackets = max(prompt.count(b"["), prompt.count(b"]"))  # a text's too, which is none here
    require_possible(max(1, brackets - 1), room.max_open)
    longest = max(ids.count(b",") for ids in prompt.removesuffix(b"]").split(b"]"))
    room.require_tokens(longest, param=name, answer=None, got=f"at least {longest}")


def _count_texts(prompt: bytes, room: Room, name: str) -> None:
    end = count = 0
    for text in _TEXT.finditer(prompt):
        if prompt[end : text.start()].strip(_BLANKS) != (b"," if count else b"["):
            break
        end, count = text.end(), count + 1
        require_possible(count, room.max_open)
    if prompt[end:].strip(_BLANKS) != b"]":
        raise mixed_prompts(name, count)
