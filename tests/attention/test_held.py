"""The walk over a backend's buffers finds every tensor, or says what it cannot look into."""

from collections import deque, namedtuple
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from paceline.attention.held import OPAQUE, tensor_bytes, tensors_in
from paceline.core.errors import ConfigError
from paceline.core.modes import MaskKind

PREFIX = torch.zeros(3, dtype=torch.int32)
Named = namedtuple("Named", ["prefix"])


@dataclass(frozen=True, slots=True)
class Frozen:
    prefix: Tensor
    size: int = 4


class Plain:
    def __init__(self, prefix: object) -> None:
        self.prefix = prefix
        self.kind = MaskKind.CAUSAL
        self.device, self.dtype, self.library = torch.device("cpu"), torch.int32, torch
        self.shape = torch.Size((3, 4))
        self.nothing = None


class Slotted:
    __slots__ = ("absent", "prefix")

    def __init__(self, prefix: Tensor) -> None:
        self.prefix = prefix


class SlottedBelow(Slotted):
    __slots__ = ("more",)


class Private:
    __slots__ = ("__prefix",)

    def __init__(self, prefix: Tensor) -> None:
        self.__prefix = prefix


@dataclass
class Derived:
    size: int = 4

    def __post_init__(self) -> None:
        self.prefix = PREFIX  # no field


class Items(dict):  # type: ignore[type-arg]
    prefix = None


def items_and_more() -> Items:
    items = Items(size=4)
    items.prefix = PREFIX
    return items


class Module(torch.nn.Module):
    def __init__(self, prefix: Tensor) -> None:
        super().__init__()
        self.register_buffer("prefix", prefix)


FORMS: dict[str, tuple[object, str]] = {
    "tensor": (PREFIX, "backend"),
    "tuple": ((1, PREFIX), "backend.1"),
    "list": ([None, PREFIX], "backend.1"),
    "dict": ({"prefix": PREFIX}, "backend.prefix"),
    "dict by number": ({16: PREFIX}, "backend.16"),
    "dataclass": (Frozen(PREFIX), "backend.prefix"),
    "named tuple": (Named(PREFIX), "backend.0"),
    "plain object": (Plain(PREFIX), "backend.prefix"),
    "namespace": (SimpleNamespace(prefix=PREFIX), "backend.prefix"),
    "slots": (Slotted(PREFIX), "backend.prefix"),
    "slots of a base": (SlottedBelow(PREFIX), "backend.prefix"),
    "private slots": (Private(PREFIX), "backend._Private__prefix"),
    "dataclass, of no field": (Derived(), "backend.prefix"),
    "attribute of a dict": (items_and_more(), "backend.prefix"),
    "nested": ({"a": [Plain((Frozen(PREFIX),))]}, "backend.a.0.prefix.0.prefix"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_is_found_in_any_container_by_the_path_to_it(form: str) -> None:
    held, path = FORMS[form]
    found = tensors_in("backend", held)
    assert list(found) == [path]
    assert found[path] is PREFIX
    assert tensor_bytes(held) == 12


def test_a_tensor_of_a_module_is_found() -> None:
    assert list(tensors_in("backend", Module(PREFIX))) == ["backend._buffers.prefix"]


def test_buffers_without_a_tensor_hold_nothing() -> None:
    assert tensors_in("backend", None) == {}
    assert tensors_in("backend", {"library": torch, "kind": Plain, "names": {"x", 1}}) == {}


def test_objects_that_hold_each_other_are_walked_once() -> None:
    one, other = Plain(PREFIX), Plain(None)
    one.other, other.other = other, one  # type: ignore[attr-defined]
    assert list(tensors_in("backend", one)) == ["backend.prefix"]


def test_a_tensor_with_two_names_has_both_and_counts_once() -> None:
    held = {"one": PREFIX, "other": Plain(PREFIX)}
    assert list(tensors_in("backend", held)) == ["backend.one", "backend.other.prefix"]
    assert tensor_bytes(held) == 12


def test_tensors_whose_paths_read_the_same_are_both_found() -> None:
    other = PREFIX.clone()
    for held in ({1: PREFIX, "1": other}, {"1": {"2": PREFIX}, "1.2": other}):
        found = list(tensors_in("backend", held).values())
        assert [id(tensor) for tensor in found] == [id(PREFIX), id(other)]


class PythonDeque(deque):  # type: ignore[type-arg]
    """Has attributes, and items that are none."""


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        ({PREFIX}, "builtins.set"),
        (frozenset({PREFIX}), "builtins.frozenset"),
        (deque([PREFIX]), "collections.deque"),
        (PythonDeque([PREFIX]), "test_held.PythonDeque"),
        (numpy.zeros(3), "numpy.ndarray"),
        (lambda: PREFIX, "builtins.function"),
        (partial(print, PREFIX), "functools.partial"),
        (iter([PREFIX]), "builtins.list_iterator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_looked_into_is_refused_by_its_path(held: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tensors_in("backend", {"prefix": [held]})
    text = str(caught.value)
    assert text.startswith(
        "backend.prefix.0, of what make_buffers returned must be a tensor, number or text, or a "
        f"dataclass, tuple, list, dict or plain object of such, got a {kind}; hold tensors in one"
    )
    assert "metadata=paceline.attention.held.OPAQUE" in text


def test_an_opaque_field_is_the_backends_own_matter() -> None:
    @dataclass
    class Bound:
        prefix: Tensor
        wrappers: set[Tensor] = field(metadata=OPAQUE)

    assert list(tensors_in("backend", Bound(PREFIX, {PREFIX}))) == ["backend.prefix"]
