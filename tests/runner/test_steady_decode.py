"""Between joins and leaves a decode step needs no host data at all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runner import Driver, TinyModel, random_prompts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.runner.model_runner import _execute
from paceline.runner.recording.host_reads import REFUSED_OPERATORS
from paceline.runner.streams import DeferredStream

STEPS = 100


class NoHostData(TorchDispatchMode):
    """Refuses what brings host data to the device: on a CPU too, where the devices are one."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        slots = driver.runner._staging._slots
        self._staged = {slot._bytes.untyped_storage().data_ptr() for slot in slots}
        self.seen = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.seen += 1
        name = func._schema.name
        assert name not in REFUSED_OPERATORS, f"{name}: host data becomes a tensor"
        if name == "aten::_to_copy":
            assert kwargs.get("device") in (None, args[0].device), f"to {kwargs['device']}"
        if name == "aten::copy_":
            assert not self._is_staged(args[1]), "a copy out of a staging slot"
        return func(*args, **kwargs)

    def _is_staged(self, source: Tensor) -> bool:
        return source.untyped_storage().data_ptr() in self._staged


@pytest.mark.parametrize("graph_max_reqs", [None, 8], ids=["eager", "recorded"])
@pytest.mark.parametrize("stream", ["inline", "deferred"])
@pytest.mark.parametrize("rows", [[1], [3, 1, 2]], ids=["one", "three"])
def test_steady_decode_steps_stage_nothing(
    tiny: TinyModel,
    counts: Counter[str],
    graph_max_reqs: int | None,
    stream: str,
    rows: list[int],
) -> None:
    driver = Driver(
        tiny,
        graph_max_reqs=graph_max_reqs,
        stream=DeferredStream() if stream == "deferred" else None,
        sanitize=False,
    )
    driver.prefill(dict(zip(rows, random_prompts([5, 9, 2]), strict=False)))
    driver.decode(rows, steps=3)  # the eager use, the capture and its first replay
    before = Counter(counts)
    driver.decode_overlapped([rows] * STEPS)
    for name in ("put", "fill", "copies"):
        assert counts[name] == before[name], name
    assert counts["replay"] - before["replay"] == (STEPS if graph_max_reqs else 0)
    assert all(len(driver.tokens[row]) == STEPS + 4 for row in rows)


@pytest.mark.parametrize("stream", ["inline", "deferred"])
def test_no_operator_of_an_eager_steady_step_brings_host_data(tiny: TinyModel, stream: str) -> None:
    deferred = DeferredStream() if stream == "deferred" else None
    driver = Driver(tiny, graph_max_reqs=None, stream=deferred, sanitize=False)
    prompts = dict(zip([1, 2], random_prompts([5, 9]), strict=True))
    driver.prefill(prompts)
    driver.decode([1, 2])
    with NoHostData(driver) as mode:
        driver.decode_overlapped([[1, 2]] * STEPS)
        assert mode.seen > 10 * STEPS
    for row, prompt in prompts.items():
        assert driver.tokens[row] == tiny.greedy(prompt, STEPS + 2)


def test_the_net_notices_each_way_host_data_could_come_in(tiny: TinyModel) -> None:
    driver = Driver(tiny, graph_max_reqs=None, sanitize=False)
    driver.prefill({1: [5, 6]})
    staged = driver.runner._staging.slot(0).put(np.zeros((1, 3), dtype=np.int32))
    with NoHostData(driver):
        with pytest.raises(AssertionError, match="a copy out of a staging slot"):
            _execute([(driver.parts.buffers.facts[:1], staged)])
        with pytest.raises(AssertionError, match="to meta"):
            driver.parts.buffers.facts.to("meta")
        with pytest.raises(AssertionError, match="lift_fresh: host data becomes a tensor"):
            torch.tensor([5, 6])


def test_another_membership_stages_again(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny)
    driver.prefill(dict(zip([1, 2], random_prompts([5, 9]), strict=True)))
    driver.decode([1, 2], steps=3)
    before = Counter(counts)
    driver.decode([2, 1])
    driver.decode([2, 1])
    driver.decode([1, 2])
    assert counts["fill"] - before["fill"] == 2
    assert counts["put"] - before["put"] == 2
    assert counts["copies"] - before["copies"] == 2


def test_a_capture_in_between_does_not_lose_the_facts(
    tiny: TinyModel, counts: Counter[str]
) -> None:
    """Capturing pads the buffers; the step that follows stages its facts anew."""
    driver = Driver(tiny)
    prompts = dict(zip([1, 2], random_prompts([5, 9]), strict=True))
    driver.prefill(prompts)
    before = counts["fill"]
    driver.decode([1, 2])
    driver.decode([1, 2])
    assert counts["fill"] - before == 2
    driver.decode([1, 2], steps=5)
    for row, prompt in prompts.items():
        assert driver.tokens[row] == tiny.greedy(prompt, 8)
