"""Where an operation runs: on its tensors' device, or on the one that the meta device stands for.

A budget is a run on the meta device, which computes nothing: within `StandIn` its tensors are those
of a device that may not be here, and the code takes the path that it would take there.  Code asks
this module, never `tensor.device.type`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.gpus import INTERPRETER_SMS, MOST_SMS
from paceline.kernels.custom_op import DispatchMode
from paceline.kernels.shapes import result_of


class StandIn(DispatchMode):
    """Within the block tensors of the meta device are those of a device of `device_type`.

    multiprocessors: of a GPU; None: one that is not known, which has the most there are.
    capability: of a GPU; None: not known.
    """

    def __init__(
        self,
        device_type: str,
        multiprocessors: int | None,
        capability: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.device_type = device_type
        self.multiprocessors = multiprocessors
        self.capability = capability

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if places := _places_written(func):
            written = _written(places, args, kwargs or {})
            if any(tensor.is_meta for tensor in written):
                return _as_returned(func, written)  # there is nothing to compute
        result = result_of(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
        return func(*args, **(kwargs or {}))


def _written(
    places: Sequence[tuple[int, str]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors at these places, in order."""
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
    return [value for value in values if isinstance(value, Tensor)]


@cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """(index, name) of the arguments that an operator writes and gives back; none where it makes
    new tensors too, or changes what a tensor is."""
    schema = func._schema
    if not schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return ()
    if any(each.alias_info is None for each in schema.returns):
        return ()
    return tuple((i, each.name) for i, each in enumerate(schema.arguments) if _is_written(each))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _as_returned(func: Any, written: list[Tensor]) -> Any:
    num = len(func._schema.returns)
    if num == 0:
        return None
    return written[0] if num == 1 else tuple(written)


def device_type(device: torch.device) -> str:
    """ "cpu" or "cuda"; "meta" outside of a StandIn."""
    kind: str = device.type
    if kind == "meta" and (stand_in := _innermost()) is not None:
        return stand_in.device_type
    return kind


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; of the meta device those it stands for, the most where none are known."""
    if device.type == "cuda":
        return _of_gpu(device)
    if device_type(device) == "cpu":
        return INTERPRETER_SMS
    stand_in = _innermost()
    return MOST_SMS if stand_in is None else stand_in.multiprocessors or MOST_SMS


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; of the meta device that of what it stands for; None: it has
    none, or it is not known."""
    if device.type == "cuda":
        return _capability_of_gpu(device)
    stand_in = _innermost() if device.type == "meta" else None
    return None if stand_in is None else stand_in.capability


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9, or stands for one: some kernels are written for
    its matrix instructions, or were measured there alone."""
    found = capability(device)
    return device_type(device) == "cuda" and found is not None and found[0] == 9


@cache
def _capability_of_gpu(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


@cache
def _of_gpu(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _innermost() -> StandIn | None:
    # Asked by every operation of a rehearsal: torch's own walk makes a list of all modes first.
    for place in reversed(range(torch._C._len_torch_dispatch_stack())):
        mode = torch._C._get_dispatch_stack_at(place)
        if isinstance(mode, StandIn):
            return mode
    return None
