"""The recorded graph: a CUDA graph's contract on a CPU.

Capture executes a function once and records every operator it dispatches, with its arguments.
Replay executes the same operators on the same storages: Python does not run, host numbers are
frozen, addresses are reused, exactly as in a CUDA graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.custom_op import cpu_kernel
from paceline.runner.host_reads import refuse_host_reads

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# Contents undefined until written: nothing to replay.
_EMPTY_FACTORIES = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
)
# The same function by a shorter way than the operator's own: a step calls these most.
_DIRECT: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.add.out: torch.add,
    torch.ops.aten.addmm.out: torch.addmm,
    torch.ops.aten.index_select.out: torch.index_select,
    torch.ops.aten.mm.out: torch.mm,
    torch.ops.aten.mul.out: torch.mul,
}
_POISON_INT = 0x3FFF_FFFF  # an index no buffer has


class RecordedGraph:
    """One captured function.

    poison: fill intermediates with NaN (integers: an impossible index) before each replay, so that
    a value carried over from an earlier replay shows.
    """

    def __init__(self, *, poison: bool) -> None:
        self._poison = poison
        self._calls: list[Call] = []
        self._intermediates: dict[int, Tensor] = {}  # storage address -> a tensor that owns it

    def capture(self, function: Callable[[], None]) -> None:
        """Execute and record `function`.  Raises HostReadError for what a graph cannot hold."""
        with torch.no_grad(), refuse_host_reads(self._record):
            function()

    def replay(self) -> None:
        """Execute what was recorded."""
        with torch.inference_mode():
            if self._poison:
                for tensor in self._intermediates.values():
                    _poison(tensor)
            for operator, args, kwargs in self._calls:
                operator(*args, **kwargs)

    def intermediate_bytes(self) -> int:
        """Bytes of all storages the capture allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._intermediates.values())

    def _record(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if func._schema.is_mutable:
            self._calls.append((cpu_kernel(func) or func, tuple(args), dict(kwargs)))
            return
        outputs = [result] if isinstance(result, Tensor) else list(result)
        inputs = _storages(args) | _storages(kwargs.values())
        if all(output.untyped_storage().data_ptr() in inputs for output in outputs):
            return  # a view of a storage that is replayed already
        for output in outputs:
            self._intermediates[output.untyped_storage().data_ptr()] = output
        if func._schema.name not in _EMPTY_FACTORIES:
            self._calls.append(_refill(func, tuple(args), dict(kwargs), outputs))


def _storages(values: Any) -> set[int]:
    """Addresses of the storages of `values` and of tensors in lists among them."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, list | tuple):
            found |= _storages(value)
    return found


def _refill(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
) -> Call:
    """A call that computes `func` again into the storages of its first outputs."""
    out_call = _out_variant(func, args, kwargs, outputs)
    if out_call is not None:
        operator, args, kwargs = out_call
        return _DIRECT.get(operator, operator), args, kwargs

    def run_and_copy() -> None:
        fresh = func(*args, **kwargs)
        for kept, new in zip(outputs, [fresh] if isinstance(fresh, Tensor) else fresh, strict=True):
            kept.copy_(new)

    return run_and_copy, (), {}


def _out_variant(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]
) -> Call | None:
    """The operator's out= overload with the same parameters, where torch has one."""
    names = [argument.name for argument in func._schema.arguments]
    for overload in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, overload)
        schema = candidate._schema
        out_names = [a.name for a in schema.arguments if a.alias_info is not None]
        rest = [a.name for a in schema.arguments if a.alias_info is None]
        factory_only = [name for name in names if name in _FACTORY_OPTIONS and name not in rest]
        if len(out_names) != len(outputs) or not _same_types(func, candidate):
            continue
        if rest != [name for name in names if name not in factory_only]:
            continue
        kept = {name: value for name, value in kwargs.items() if name not in factory_only}
        return candidate, args, kept | dict(zip(out_names, outputs, strict=True))
    return None


_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


def _same_types(func: Any, candidate: Any) -> bool:
    wanted = {argument.name: str(argument.type) for argument in func._schema.arguments}
    return all(
        wanted.get(argument.name) == str(argument.type)
        for argument in candidate._schema.arguments
        if argument.alias_info is None
    )


def _poison(tensor: Tensor) -> None:
    flat = tensor.new_empty(0).set_(tensor.untyped_storage())
    if flat.is_floating_point():
        flat.fill_(float("nan"))
    elif flat.dtype is torch.bool:
        flat.fill_(True)
    else:
        flat.fill_(_POISON_INT if flat.dtype in (torch.int32, torch.int64) else 127)
