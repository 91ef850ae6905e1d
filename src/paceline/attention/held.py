"""What a backend holds: the tensors among its buffers, and their bytes.

One walk for all who ask: the guard, the sanitizer and the memory budget.  It sees every tensor or
raises, so that a buffer in a container of another kind is not silently unguarded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import ConfigError

# Metadata of a dataclass field that the walk passes over: a library's own objects, whose memory
# the backend counts in its buffer_bytes and keeps in place itself.
OPAQUE: Mapping[str, bool] = {"opaque": True}
_NUMBERS = (int, float, complex, str, bytes, Enum)
_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE of a type's flags
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONSTANTS = (*_NUMBERS, *_OF_TORCH, type, ModuleType)


def tensors_in(name: str, buffers: object) -> dict[str, Tensor]:
    """The tensors of a backend's buffers, each by the path of fields, keys and indices to it.

    Raises ConfigError where something cannot be looked into.
    """
    found: dict[str, Tensor] = {}
    for path, tensor in _walk(name, buffers, ()):
        while path in found:  # keys 1 and "1" of one dict
            path += "'"
        found[path] = tensor
    return found


def tensor_bytes(buffers: object) -> int:
    """Bytes of the tensors of a backend's buffers; one with two names counts once."""
    found = {id(tensor): tensor.nbytes for tensor in tensors_in("backend", buffers).values()}
    return sum(found.values())


def _walk(name: str, held: object, above: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """above: ids of the containers that hold this one, so that a cycle ends."""
    if isinstance(held, Tensor):
        yield name, held
    elif not _is_constant(held):
        for part, value in _parts(name, held):
            if id(value) not in above:
                yield from _walk(f"{name}.{part}", value, (*above, id(held)))


def _is_constant(held: object) -> bool:
    """Whether nothing can be in it, as in a number or a set of texts."""
    if isinstance(held, set | frozenset):
        return all(map(_is_constant, held))
    return held is None or isinstance(held, _CONSTANTS)


class Link(NamedTuple):
    """What an object holds in one place."""

    owner: Any
    key: Any  # of an item; otherwise the attribute's name
    value: Any  # when the link was found
    is_item: bool


def links(held: Any) -> Iterator[Link]:
    """Items of a container, attributes of an object; none of what cannot be looked into."""
    if isinstance(held, tuple | list | dict):
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        yield from (Link(held, key, item, True) for key, item in pairs)
    elif not _has_parts(held):
        return
    declared = fields(held) if is_dataclass(held) else ()
    opaque = {each.name for each in declared if each.metadata.get("opaque")}
    slots = [slot for kind in type(held).__mro__ for slot in _slots(kind)]
    found = {slot: getattr(held, slot) for slot in slots if hasattr(held, slot)}
    for each, value in (found | dict(getattr(held, "__dict__", {}))).items():
        if each not in opaque:
            yield Link(held, each, value, False)


def _parts(name: str, held: Any) -> Iterator[tuple[str, object]]:
    """What an object holds, by the last part of its name: items and attributes."""
    if not (isinstance(held, tuple | list | dict) or _has_parts(held)):
        raise _refusal(name, held)
    yield from ((str(link.key), link.value) for link in links(held))


def _has_parts(held: Any) -> bool:
    return is_dataclass(held) or isinstance(held, SimpleNamespace) or _is_plain(held)


def _refusal(name: str, held: object) -> ConfigError:
    return ConfigError.about(
        f"{name}, of what make_buffers returned",
        expected="a tensor, number or text, or a dataclass, tuple, list, dict or plain "
        "object of such",
        got=f"a {type(held).__module__}.{type(held).__name__}",
        remedy="hold tensors in one of these; a library's own object goes into a dataclass "
        "field with metadata=paceline.attention.held.OPAQUE, and its bytes into "
        "buffer_bytes",
    )


def _is_plain(held: object) -> bool:
    """Whether an object's attributes are all it holds: not so of functions and classes in C."""
    kinds = type(held).__mro__[:-1]
    has_attributes = hasattr(held, "__dict__") or any(map(_slots, kinds))
    is_called = callable(held) and not isinstance(held, torch.nn.Module)
    return has_attributes and not is_called and all(kind.__flags__ & _IN_PYTHON for kind in kinds)


def _slots(kind: type) -> list[str]:
    """Attributes of a class in Python that are in no __dict__, private ones by their real name."""
    named = vars(kind).items() if kind.__flags__ & _IN_PYTHON else ()
    return [name for name, at in named if isinstance(at, MemberDescriptorType)]
