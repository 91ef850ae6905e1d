"""What a graph cannot hold, refused while it is captured, with the operation's name.

Two nets: operations whose result reaches the host or whose shape depends on data are caught at
the dispatcher by torch's own operator tags; reads that never reach the dispatcher on a CPU
(`tolist`, `numpy`, `cpu`, ...) are caught as Python calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.core.errors import HostReadError
from paceline.kernels.custom_op import DispatchMode

# Sees every operator executed: (operator, args, kwargs, result).
Record = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]

REFUSED_METHODS = (
    "__array__",
    "__bool__",
    "__complex__",
    "__contains__",
    "__dlpack__",
    "__float__",
    "__format__",
    "__index__",
    "__int__",
    "__repr__",
    "cpu",
    "cuda",
    "item",
    "numpy",
    "tolist",
)
# Host data becomes device data: a host-to-device copy whose source dies before the replay.
REFUSED_OPERATORS = ("aten::lift_fresh", "aten::lift_fresh_copy")
# Operators with mask or tensor indices: static with integer indices, data-dependent with masks.
INDEX_OPERATORS = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")

_REMEDY = "keep it in a device tensor; lengths the host knows come by host_plan"


def _refuse(name: str, why: str) -> HostReadError:
    return HostReadError(
        f"a recorded region must be device-only with static shapes, got '{name}' ({why}); {_REMEDY}"
    )


class _MethodNet(TorchFunctionMode):
    """Refuses Python calls that read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._refused = {getattr(Tensor, name): name for name in REFUSED_METHODS}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = self._refused.get(func)
        if name is not None:
            raise _refuse(f"Tensor.{name}", "reads a device value on the host")
        return func(*args, **(kwargs or {}))


def check_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise HostReadError when a dispatched operator cannot be in a graph."""
    name, kind = func._schema.name, _kind_of(func)
    if kind.refused is not None:
        raise _refuse(name, kind.refused)
    if kind.may_draw and not _draws_nothing(func, args, kwargs):
        raise _refuse(name, "its random state would be frozen")
    if kind.has_indices and any(_is_mask(index) for index in args[1]):
        raise _refuse(name, "the shape of a mask index depends on data")
    devices = {arg.device.type for arg in args if isinstance(arg, Tensor) and arg.dim() > 0}
    if kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    if len(devices) > 1:
        raise _refuse(name, f"it mixes devices {sorted(devices)}")


class _Kind(NamedTuple):
    """What an operator is, whatever its arguments are."""

    refused: str | None  # why no graph can hold it
    may_draw: bool  # random numbers
    has_indices: bool


@cache
def _kind_of(func: Any) -> _Kind:
    name, tags = func._schema.name, func.tags
    has_indices = name in INDEX_OPERATORS
    refused = None
    if torch.Tag.data_dependent_output in tags:
        refused = "its result is a host value"
    elif name in REFUSED_OPERATORS:
        refused = "host data enters the region"
    elif torch.Tag.dynamic_output_shape in tags and not has_indices:
        refused = "its shape depends on data"
    return _Kind(refused, torch.Tag.nondeterministic_seeded in tags, has_indices)


def _draws_nothing(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that may draw random numbers was told not to: dropout 0."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    return not bound.get("dropout_p", 0.0)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class _OperatorNet(DispatchMode):
    """Refuses dispatched operators; runs everything else, and reports each call to `record`."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        check_operator(func, args, kwargs)
        # An opaque operator is a kernel: what its implementation reads is its own affair.
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        self._record(func, args, kwargs, result)
        return result


@contextmanager
def refuse_host_reads(
    record: Record,
) -> Iterator[None]:
    """Within the block host reads raise HostReadError; `record` sees every operator executed."""
    with _MethodNet(), _OperatorNet(record):
        yield
