"""Step frames: a Step as bytes for the other processes of a model, and back.

A frame is msgpack: the fields of Step in their order, without names, deltas behind the others.
Both sides make this layout from the same classes; `LAYOUT` tells whether they are the same.
"""

from dataclasses import fields
from typing import Any, get_type_hints
from zlib import crc32

import msgspec

from paceline.core.errors import RequestError
from paceline.core.step import Delta, JoinDelta, PageDelta, Step


def _fields(kind: type, *, without: str) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in fields(kind) if field.name != without]


# What an encoder reads is a tensor, which no frame holds.
_JOIN_FIELDS = _fields(JoinDelta, without="encoder")
_PAGE_FIELDS = _fields(PageDelta, without="")
_STEP_FIELDS = _fields(Step, without="deltas")
_FORM: dict[str, Any] = {"array_like": True, "frozen": True}
_Join: Any = msgspec.defstruct("Join", _JOIN_FIELDS, tag=0, **_FORM)
_Page: Any = msgspec.defstruct("Page", _PAGE_FIELDS, tag=1, **_FORM)
_Frame: Any = msgspec.defstruct(
    "Frame", [*_STEP_FIELDS, ("deltas", tuple[_Join | _Page, ...])], **_FORM
)
LAYOUT = crc32(repr((_STEP_FIELDS, _JOIN_FIELDS, _PAGE_FIELDS)).encode())
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Frame)


def encode_step(step: Step) -> bytes:
    """Raises RequestError for rows in place of embeddings and of encoders: they are tensors."""
    values = [getattr(step, name) for name, _ in _STEP_FIELDS]
    return _ENCODER.encode(_Frame(*values, tuple([_packed(delta) for delta in step.deltas])))


def decode_step(frame: bytes) -> Step:
    """Raises msgspec.ValidationError for what is no frame."""
    found = _DECODER.decode(frame)
    values = {name: getattr(found, name) for name, _ in _STEP_FIELDS}
    return Step(**values, deltas=tuple([_unpacked(delta) for delta in found.deltas]))


def _packed(delta: Delta) -> Any:
    if isinstance(delta, PageDelta):
        return _Page(*[getattr(delta, name) for name, _ in _PAGE_FIELDS])
    if isinstance(delta, JoinDelta) and delta.encoder is None:
        return _Join(*[getattr(delta, name) for name, _ in _JOIN_FIELDS])
    what = "encoder's input" if isinstance(delta, JoinDelta) else "--max-prompt-embeds"
    raise RequestError.about(
        f"step for other processes ({what})",
        expected="of numbers alone",
        got=f"{type(delta).__name__} with a tensor",
        remedy="leave --tensor-parallel-size out",
    )


def _unpacked(packed: Any) -> Delta:
    if isinstance(packed, _Page):
        return PageDelta(**{name: getattr(packed, name) for name, _ in _PAGE_FIELDS})
    return JoinDelta(**{name: getattr(packed, name) for name, _ in _JOIN_FIELDS})
