"""The recorded graph: a CUDA graph's contract on a CPU.

Capture executes a function once and records every operator it dispatches, with its arguments.
Replay executes the same operators on the same storages: Python does not run, host numbers are
frozen, addresses are reused, exactly as in a CUDA graph.  Graphs share an arena, as CUDA graphs do
a pool.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import GraphError, message
from paceline.kernels.compile_ahead import EMPTY_FACTORIES
from paceline.kernels.custom_op import Bind, Run, bind_of
from paceline.runner.recording.arena import Arena
from paceline.runner.recording.host_reads import refuse_host_reads

_NATIVE = torch._C._VariableFunctions
_CASTS = ("aten::_to_copy", "aten::to")  # a copy into a tensor casts and copies once
_POISON_INT = 0x3FFF_FFFF  # an index no buffer has


class Call(NamedTuple):
    """One operator of a recording."""

    bind: Bind  # called with the arguments when all tensors lie where they stay
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def bound(self) -> Run:
        return self.bind(*self.args, **self.kwargs)


class GraphTooLarge(GraphError):
    """A graph whose intermediates outgrow the limit of its arena."""


class RecordedGraph:
    """One captured function.

    poison: fill intermediates with NaN (integers: an impossible index) before each replay, so that
    a value carried over from an earlier replay, or from another graph, shows.
    arena: where intermediates lie, shared with graphs that run before or after; None: its own.
    """

    def __init__(self, *, poison: bool, arena: Arena | None = None) -> None:
        self._poison = poison
        self._arena = Arena() if arena is None else arena
        self._calls: list[Call] = []
        self._runs: list[Run] = []  # the calls, bound where the arena was then
        self._bound_at = 0
        self._pieces: list[Tensor] = []  # the intermediates' storages, flat

    def capture(self, function: Callable[[], None]) -> None:
        """Execute and record `function`; the tensors it makes move into the arena.

        Raises HostReadError for what a graph cannot hold, GraphTooLarge beyond the arena's limit.
        """
        recording = _Recording(self._arena.limit_bytes)
        with torch.no_grad(), refuse_host_reads(recording.record):
            function()
        with torch.inference_mode():  # some may be tensors of that mode
            self._pieces = self._arena.lay(recording.owners, recording.seen.values())
        self._calls = recording.calls

    def replay(self) -> None:
        """Execute what was recorded."""
        with torch.inference_mode():
            if not self._runs or self._bound_at != self._arena.address:
                self._bound_at = self._arena.address
                self._runs = [call.bound() for call in self._calls]
            if self._poison:
                for piece in self._pieces:
                    _poison(piece)
            for run in self._runs:
                run()


class _Recording:
    """What one capture has seen so far.  Keeps every tensor alive, so that no address returns."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.calls: list[Call] = []
        self.owners: dict[int, Tensor] = {}  # storage address -> a tensor of an intermediate
        self.seen: dict[int, Tensor] = {}  # id -> every tensor given to or made by an operator
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def record(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Take in one operator that was executed."""
        given = list(tensors_among((*args, *kwargs.values())))
        self.seen.update((id(tensor), tensor) for tensor in given)
        if func._schema.is_mutable:
            self.calls.append(_again(func, args, kwargs))
            return
        outputs = [result] if isinstance(result, Tensor) else list(result)
        self.seen.update((id(tensor), tensor) for tensor in outputs)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in given}
        if all(output.untyped_storage().data_ptr() in inputs for output in outputs):
            return  # a view of a storage that is replayed already
        for output in outputs:
            self._own(output)
        if func._schema.name not in EMPTY_FACTORIES:  # there is nothing to replay
            self.calls.append(_refill(func, tuple(args), dict(kwargs), outputs))

    def _own(self, output: Tensor) -> None:
        storage = output.untyped_storage()
        if storage.data_ptr() not in self.owners:
            self._bytes += storage.nbytes()
        self.owners[storage.data_ptr()] = output
        if self._limit_bytes is not None and self._bytes > self._limit_bytes:
            raise GraphTooLarge(
                message(
                    "bytes of a recorded graph's intermediates",
                    expected=f"at most {self._limit_bytes}",
                    got=f"{self._bytes} and more",
                    remedy="run the step without a graph",
                )
            )


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among `values` and in lists among them, but for weights in an order of oneDNN's,
    which have no storage and stay where they are."""
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_mkldnn:
                yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(value)


def _refill(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
) -> Call:
    """A call that computes `func` again into the storages of its first outputs."""
    if func._schema.name in _CASTS:
        return Call(partial, (Tensor.copy_, outputs[0], args[0]), {})
    out_call = _out_variant(func, args, kwargs, outputs)
    if out_call is not None:
        return out_call

    function = _shorter(func)

    def run_and_copy() -> None:
        fresh = function(*args, **kwargs)
        for kept, new in zip(outputs, [fresh] if isinstance(fresh, Tensor) else fresh, strict=True):
            kept.copy_(new)

    return Call(partial, (run_and_copy,), {})


def _again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A call of an operator that writes to its arguments."""
    bind = bind_of(func)
    if bind is not None:
        return Call(bind, tuple(args), dict(kwargs))
    return Call(partial, (_shorter(func), *args), dict(kwargs))


def _shorter(operator: Any) -> Any:
    """The same function by torch's own binding, where it has one: an overload boxes its arguments,
    which takes several times as long."""
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    if name == schema.name or written not in ([], ["self"], ["out"]):
        return operator
    return getattr(torch._C.TensorBase if written == ["self"] else _NATIVE, name, operator)


def _out_variant(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
) -> Call | None:
    """The operator's out= overload with the same parameters, where torch has one."""
    form = _out_form(func, len(outputs))
    if form is None:
        return None
    operator, out_names, left_out = form
    kept = {name: value for name, value in kwargs.items() if name not in left_out}
    kept |= dict(zip(out_names, outputs, strict=True))
    return Call(partial, (operator, *args), kept)


@cache
def _out_form(func: Any, num_outputs: int) -> tuple[Any, list[str], list[str]] | None:
    """(out= overload by its shorter way, its outputs, what it does not take), if torch has one."""
    names = [argument.name for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        if torch.Tag.generated in candidate.tags:  # it computes, then copies
            continue
        schema = candidate._schema
        out_names = [a.name for a in schema.arguments if a.alias_info is not None]
        rest = [a.name for a in schema.arguments if a.alias_info is None]
        factory_only = [name for name in names if name in _FACTORY_OPTIONS and name not in rest]
        if len(out_names) != num_outputs or not _same_types(func, candidate):
            continue
        if rest == [name for name in names if name not in factory_only]:
            return _shorter(candidate), out_names, factory_only
    return None


_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def _same_types(func: Any, candidate: Any) -> bool:
    wanted = {argument.name: str(argument.type) for argument in func._schema.arguments}
    return all(
        wanted.get(argument.name) == str(argument.type)
        for argument in candidate._schema.arguments
        if argument.alias_info is None
    )


def _poison(flat: Tensor) -> None:
    if flat.is_floating_point():
        flat.fill_(float("nan"))
    elif flat.dtype is torch.bool:
        flat.fill_(True)
    else:
        flat.fill_(_POISON_INT if flat.dtype in (torch.int32, torch.int64) else 127)
