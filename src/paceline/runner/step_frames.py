"""Step frames: a Step as bytes for the other processes of a model, and back.

A frame is msgpack: the fields of Step in their order, without names, deltas behind the others, and
a tensor as its dtype, its shape and its bytes.  Both sides make this layout from the same classes;
`LAYOUT` tells whether they are the same.
"""

from dataclasses import fields, replace
from typing import Any, get_type_hints
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from paceline.core.input_rows import EncoderInput, InputRows
from paceline.core.step import Delta, JoinDelta, OverlayDelta, PageDelta, Step

Fields = list[tuple[str, Any]]


def _fields(kind: type, *, without: str = "", **others: Any) -> Fields:
    """others: what a field is in a frame, where that is not what it is in `kind`."""
    hints = get_type_hints(kind) | others
    return [(field.name, hints[field.name]) for field in fields(kind) if field.name != without]


_FORM: dict[str, Any] = {"array_like": True, "frozen": True}
_TENSOR_FIELDS: Fields = [("dtype", str), ("shape", tuple[int, ...]), ("data", bytes)]
_Bytes: Any = msgspec.defstruct("Bytes", _TENSOR_FIELDS, **_FORM)
_ROWS_FIELDS = _fields(InputRows, rows=_Bytes)
_Rows: Any = msgspec.defstruct("Rows", _ROWS_FIELDS, **_FORM)
_ENCODED_FIELDS = _fields(EncoderInput, data=_Bytes)
_Encoded: Any = msgspec.defstruct("Encoded", _ENCODED_FIELDS, **_FORM)
_JOIN_FIELDS = _fields(JoinDelta, encoder=_Encoded | None)
_Join: Any = msgspec.defstruct("Join", _JOIN_FIELDS, tag=0, **_FORM)
_PAGE_FIELDS = _fields(PageDelta)
_Page: Any = msgspec.defstruct("Page", _PAGE_FIELDS, tag=1, **_FORM)
_OVERLAY_FIELDS = _fields(OverlayDelta, source=_Rows)
_Overlay: Any = msgspec.defstruct("Overlay", _OVERLAY_FIELDS, tag=2, **_FORM)
_STEP_FIELDS = _fields(Step, without="deltas")
_Frame: Any = msgspec.defstruct(
    "Frame", [*_STEP_FIELDS, ("deltas", tuple[_Join | _Page | _Overlay, ...])], **_FORM
)
_FORMS: dict[type, tuple[Any, Fields]] = {
    InputRows: (_Rows, _ROWS_FIELDS),
    EncoderInput: (_Encoded, _ENCODED_FIELDS),
    JoinDelta: (_Join, _JOIN_FIELDS),
    PageDelta: (_Page, _PAGE_FIELDS),
    OverlayDelta: (_Overlay, _OVERLAY_FIELDS),
}
_KINDS = {form: kind for kind, (form, _) in _FORMS.items()}
_ALL_FIELDS = [_TENSOR_FIELDS, _STEP_FIELDS, *(each for _, each in _FORMS.values())]
LAYOUT = crc32(repr(_ALL_FIELDS).encode())
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Frame)


def encode_step(step: Step) -> bytes:
    """Rows that stand in for embeddings go as far as they are put into the overlay."""
    values = [getattr(step, name) for name, _ in _STEP_FIELDS]
    return _ENCODER.encode(_Frame(*values, tuple([_pack(_needed(each)) for each in step.deltas])))


def decode_step(frame: bytes) -> Step:
    """Tensors are on the host.  Raises msgspec.ValidationError for what is no frame."""
    found = _DECODER.decode(frame)
    values = {name: getattr(found, name) for name, _ in _STEP_FIELDS}
    return Step(**values, deltas=tuple([_unpack(each) for each in found.deltas]))


def _needed(delta: Delta) -> Delta:
    """A prefix hit may have the first rows of a prompt."""
    if not isinstance(delta, OverlayDelta):
        return delta
    source, start = delta.source, delta.start
    rows = source.rows[start - source.start :]
    return replace(delta, source=replace(source, start=start, num_tokens=len(rows), rows=rows))


def _pack(value: Any) -> Any:
    if isinstance(value, Tensor):
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _Bytes(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
    if type(value) not in _FORMS:
        return value
    form, names = _FORMS[type(value)]
    return form(*[_pack(getattr(value, name)) for name, _ in names])


def _unpack(packed: Any) -> Any:
    if isinstance(packed, _Bytes):
        data = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8)
        return data.view(getattr(torch, packed.dtype)).view(packed.shape)
    kind = _KINDS.get(type(packed))
    if kind is None:
        return packed
    return kind(**{name: _unpack(getattr(packed, name)) for name, _ in _FORMS[kind][1]})
