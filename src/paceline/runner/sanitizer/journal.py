"""The journal: which line of a step reads which tensor, through which operator.

Written only to explain a finding of the sanitizer: the step's functions run once more, eagerly, and
every operator they dispatch is noted with the tensors it takes.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.custom_op import DispatchMode

_PACKAGE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_LINES = 4  # named in a report, of all that read a tensor

Span = tuple[int, int]  # first byte's address, and the one behind the last


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator that ran."""

    operator: str
    line: str  # where it was called
    reads: tuple[Span, ...]  # what it takes and does not write
    writes: tuple[Span, ...]


def listen(function: Callable[[], None], backend: type) -> list[OperatorCall]:
    """Run `function` and note its operators, views left out.  backend: its lines are named too."""
    listener = _Listener(backend)
    with torch.no_grad(), listener:
        function()
    return listener.entries


def readers(entries: Sequence[OperatorCall], tensors: Sequence[Tensor]) -> list[str]:
    """Operators and lines that read any of `tensors`, or else that write them; at most a few."""
    spans = [span_of(tensor) for tensor in tensors]
    reading = [entry for entry in entries if _meet(entry.reads, spans)]
    return _lines(reading) if reading else writers(entries, tensors)


def writers(entries: Sequence[OperatorCall], tensors: Sequence[Tensor]) -> list[str]:
    """Operators and lines that write any of `tensors`; at most a few."""
    spans = [span_of(tensor) for tensor in tensors]
    return _lines([entry for entry in entries if _meet(entry.writes, spans)])


def span_of(tensor: Tensor) -> Span:
    """The bytes between a tensor's first element and its last."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size() if tensor.numel() else begin


def _meet(taken: Sequence[Span], spans: Sequence[Span]) -> bool:
    return any(a < d and c < b for a, b in taken for c, d in spans)


def _lines(entries: Sequence[OperatorCall]) -> list[str]:
    lines = list(dict.fromkeys(f"{entry.operator} at {entry.line}" for entry in entries))
    more = [f"{len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return lines[:_LINES] + more


class _Listener(DispatchMode):
    """Runs every operator and notes it."""

    def __init__(self, backend: type) -> None:
        super().__init__()
        self.entries: list[OperatorCall] = []
        modules = {part.__module__ for part in backend.__mro__ if part is not object}
        files = (getattr(sys.modules.get(name), "__file__", None) for name in modules)
        self._backend_files = {file for file in files if file}  # a shell's class has none

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        is_view = any(value.alias_info is not None for value in schema.returns)
        if schema.is_mutable or not is_view:
            names = [argument.name for argument in schema.arguments]
            taken = {**dict(zip(names, args, strict=False)), **kwargs}
            written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
            self.entries.append(
                OperatorCall(
                    schema.name.partition("::")[2],
                    self._line(),
                    _spans(value for name, value in taken.items() if name not in written),
                    _spans(value for name, value in taken.items() if name in written),
                )
            )
        return func(*args, **kwargs)

    def _line(self) -> str:
        """The innermost line outside torch, and the innermost of the backend's own files."""
        innermost = ""
        for file, number in _frames():
            name = _short(file)
            if name is None:
                continue
            line = f"{name}:{number}"
            innermost = innermost or line
            if file in self._backend_files:
                return line if line == innermost else f"{innermost}, from {line}"
        return innermost


def _frames() -> Iterator[tuple[str, int]]:
    """File and line of every caller, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


@cache  # of each frame of each operator
def _short(file: str) -> str | None:
    """As reports name a file; None for torch's and this."""
    path = Path(file)
    if path == Path(__file__) or _TORCH in path.parents:
        return None
    return str(path.relative_to(_PACKAGE)) if _PACKAGE in path.parents else path.name


def _spans(values: Iterator[Any]) -> tuple[Span, ...]:
    found: list[Span] = []
    for value in values:
        if isinstance(value, Tensor):
            # A weight in an order of oneDNN's own has no address; no step writes it.
            found += [] if value.is_mkldnn else [span_of(value)]
        elif isinstance(value, list | tuple):
            found += _spans(iter(value))
    return tuple(found)
