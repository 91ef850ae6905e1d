"""The guard before every graph sees a backend's buffers, whatever container they are in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_runner import Driver, TinyModel, random_prompts
from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import Limits
from paceline.core.errors import ConfigError, GraphGuardError, SanitizerError
from paceline.kernels.step_view import StepView
from paceline.runner.model_runner import ModelRunner


@dataclass(slots=True)
class Writable:
    made: Any
    prefix: Tensor


class Plain:
    def __init__(self, made: Any, prefix: Tensor) -> None:
        self.made, self.prefix = made, prefix


CONTAINERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "dataclass": Writable,
    "plain object": Plain,
    "dict": lambda made, prefix: {"made": made, "prefix": prefix},
}


class Held(TorchBackend):
    """Right: keeps the longest prefix in a buffer of its own, where `make` says."""

    name = "held"

    def __init__(self, make: Callable[[Any, Tensor], Any]) -> None:
        self._make = make

    def make_buffers(self, limits: Limits) -> Any:
        return self._make(super().make_buffers(limits), torch.zeros(1, dtype=torch.int32))

    def plan(self, view: StepView, buffers: Any) -> Any:
        longest = view.prefix_lens.max().view(1)
        self.keep(buffers if isinstance(buffers, dict) else _Attributes(buffers), longest)
        made = buffers["made"] if isinstance(buffers, dict) else buffers.made
        return super().plan(view, made)

    def keep(self, buffers: Any, longest: Tensor) -> None:
        buffers["prefix"].copy_(longest)


class Replaces(Held):
    """Binds another tensor in every plan."""

    def keep(self, buffers: Any, longest: Tensor) -> None:
        buffers["prefix"] = longest


class _Attributes:
    """An object's attributes as items."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getitem__(self, name: str) -> Any:
        return getattr(self._held, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._held, name, value)


def decode(tiny: TinyModel, backend: TorchBackend, *, sanitize: bool) -> Driver:
    """Prefill and steps that capture and replay a graph."""
    driver = Driver(tiny, backend=backend, sanitize=sanitize, boot=False)
    driver.prefill(dict(zip((1, 2), random_prompts([5, 9]), strict=True)))
    driver.decode((1, 2), steps=3)
    return driver


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_buffer_that_stays_is_no_fault(tiny: TinyModel, container: str) -> None:
    driver = decode(tiny, Held(CONTAINERS[container]), sanitize=True)
    assert driver.runner.graphs_captured == 1
    assert driver.tokens[1] == tiny.greedy(random_prompts([5, 9])[0], 4)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_buffer_replaced_in_a_plan_is_refused_by_its_path(
    tiny: TinyModel, container: str
) -> None:
    with pytest.raises(GraphGuardError, match=r"got moved: backend\.prefix; write into"):
        decode(tiny, Replaces(CONTAINERS[container]), sanitize=False)


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_sanitizer_sees_it_in_the_first_step(tiny: TinyModel, container: str) -> None:
    with pytest.raises(SanitizerError, match=r"got moved: backend\.prefix; allocate all"):
        decode(tiny, Replaces(CONTAINERS[container]), sanitize=True)


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_memory_of_a_runner_counts_the_buffers_of_its_backend(
    tiny: TinyModel, container: str
) -> None:
    sizes = [
        _workspace(Driver(tiny, backend=backend, boot=False).runner)
        for backend in (TorchBackend(), Held(CONTAINERS[container]))
    ]
    assert sizes[1] - sizes[0] == 4


def _workspace(runner: ModelRunner) -> int:
    return runner.named_bytes()["workspace"]


def test_buffers_that_cannot_be_walked_are_refused_when_a_runner_is_built(tiny: TinyModel) -> None:
    backend = Held(lambda made, prefix: {"made": made, "prefix": {prefix}})
    with pytest.raises(ConfigError, match=r"backend\.prefix, of what make_buffers"):
        Driver(tiny, backend=backend)
