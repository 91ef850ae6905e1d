"""Step frames: a Step as bytes for the other processes of a model, and back.

A frame is msgpack: the fields of Step in their order, without names, deltas behind the others, and
a tensor as its dtype, its shape and its bytes.  Both sides make this layout from the same classes;
`LAYOUT` tells whether they are the same.  `StepForms` with names are for files, which people read
and later versions too.
"""

from dataclasses import MISSING, Field, fields, replace
from typing import Any, get_type_hints
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.step import Delta, JoinDelta, OverlayDelta, PageDelta, Step

Fields = list[tuple[Any, ...]]  # (name, type), and where there is one the default


class StepForms:
    """A struct for each class of a step: what it is packed as.

    named: by the names of its fields, without those that are as ever; else an array of all.
    """

    def __init__(self, *, named: bool) -> None:
        self._named = named
        self._form: dict[str, Any] = {"array_like": not named, "omit_defaults": named}
        self.fields: list[Fields] = []
        bytes_fields: Fields = [("dtype", str), ("shape", tuple[int, ...]), ("data", bytes)]
        self._bytes: Any = self._struct("Bytes", bytes_fields)
        rows = self._struct("Rows", _fields(InputRows, named, rows=self._bytes))
        encoded = self._struct("Encoded", _fields(EncoderInput, named, data=self._bytes))
        join = _fields(JoinDelta, named, encoder=encoded | None)
        joins = self._struct("Join", join, tag="join" if named else 0)
        pages = self._struct("Page", _fields(PageDelta, named), tag="pages" if named else 1)
        overlay = _fields(OverlayDelta, named, source=rows)
        overlays = self._struct("Overlay", overlay, tag="overlay" if named else 2)
        delta: Any = joins | pages | overlays
        self.delta = delta
        self._of_step = [each for each in _fields(Step, named) if each[0] != "deltas"]
        self.fields.append(self._of_step)
        deltas: Fields = [("deltas", tuple[delta, ...])]
        self.step: Any = msgspec.defstruct(
            "Frame",
            [*deltas, *self._of_step] if named else [*self._of_step, *deltas],
            frozen=True,
            **self._form,
        )
        self._forms: dict[type, Any] = {
            InputRows: rows,
            EncoderInput: encoded,
            JoinDelta: joins,
            PageDelta: pages,
            OverlayDelta: overlays,
        }
        self._kinds = {form: kind for kind, form in self._forms.items()}

    def pack(self, step: Step) -> Any:
        """Rows that stand in for embeddings go as far as they are put into the overlay."""
        values = [getattr(step, name) for name, *_ in self._of_step]
        deltas = tuple([self.pack_delta(each) for each in step.deltas])
        return self.step(deltas, *values) if self._named else self.step(*values, deltas)

    def unpack(self, found: Any) -> Step:
        """Tensors are on the host."""
        values = {name: getattr(found, name) for name, *_ in self._of_step}
        return Step(**values, deltas=tuple([self.unpack_delta(each) for each in found.deltas]))

    def pack_delta(self, delta: Delta) -> Any:
        return self._pack(_needed(delta))

    def unpack_delta(self, found: Any) -> Delta:
        delta: Delta = self._unpack(found)
        return delta

    def _struct(self, name: str, names: Fields, **more: Any) -> Any:
        self.fields.append(names)
        if self._named and more:
            more["tag_field"] = "kind"
        return msgspec.defstruct(name, names, frozen=True, **self._form, **more)

    def _pack(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            return self._bytes(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
        form = self._forms.get(type(value))
        if form is None:
            return value
        return form(*[self._pack(getattr(value, name)) for name in form.__struct_fields__])

    def _unpack(self, packed: Any) -> Any:
        if isinstance(packed, self._bytes):
            dtype = getattr(torch, packed.dtype)
            if not packed.data:  # which torch takes for no buffer
                return torch.empty(packed.shape, dtype=dtype)
            data = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8)
            return data.view(dtype).view(packed.shape)
        kind = self._kinds.get(type(packed))
        if kind is None:
            return packed
        names = packed.__struct_fields__
        return kind(**{name: self._unpack(getattr(packed, name)) for name in names})


def _fields(kind: type, named: bool, **others: Any) -> Fields:
    """others: what a field is in its form, where that is not what it is in `kind`.  With names,
    those that may be left out stand behind."""
    hints = get_type_hints(kind) | others
    found: Fields = [
        (field.name, hints[field.name], *(_default(field) if named else ()))
        for field in fields(kind)
        if field.compare  # others say nothing that these do not
    ]
    return sorted(found, key=len)


def _default(field: Field[Any]) -> tuple[Any, ...]:
    return () if field.default is MISSING else (field.default,)


_ARRAYS = StepForms(named=False)
LAYOUT = crc32(repr(_ARRAYS.fields).encode())
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_ARRAYS.step)


def encode_step(step: Step) -> bytes:
    """A frame."""
    return _ENCODER.encode(_ARRAYS.pack(step))


def decode_step(frame: bytes) -> Step:
    """Raises msgspec.ValidationError for what is no frame."""
    return _ARRAYS.unpack(_DECODER.decode(frame))


def _needed(delta: Delta) -> Delta:
    """A prefix hit may have the first rows of a prompt."""
    if not isinstance(delta, OverlayDelta):
        return delta
    source, start = delta.source, delta.start
    rows = source.rows[start - source.start :]
    return replace(delta, source=replace(source, start=start, num_tokens=len(rows), rows=rows))
