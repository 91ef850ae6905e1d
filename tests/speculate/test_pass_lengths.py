"""A draft pass has the lengths on the device that the host planned it with."""

from dataclasses import replace
from typing import Any

import pytest
from host_planned_backend import HostPlannedBackend
from rounds import ROWS, prefilled
from tiny_drafters import CHAIN, TREE, eagle3, standalone
from tiny_runner import TinyModel
from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend, LayerCache, Limits, Part
from paceline.core.draft_shape import DraftShape
from paceline.core.padding import PAD_PREFIX_LEN
from paceline.core.step import Step, padded_step
from paceline.kernels.step_view import StepView


class PlannedTwice(AttentionBackend):
    """The torch backend; compares what the host planned for a pass with the device's view of it."""

    name = "planned-twice"
    capabilities = replace(TorchBackend.capabilities, host_plan=True)

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}  # by the buffers of a pass
        self.compared = 0
        self._inner = TorchBackend()

    def make_buffers(self, limits: Limits) -> list[Any]:
        return [self._inner.make_buffers(limits)]  # an object per pass

    def host_plan(self, step: Step, buffers: Any) -> None:
        self.steps[id(buffers)] = step

    def plan(self, view: StepView, buffers: Any) -> Any:
        step = self.steps.pop(id(buffers))
        extends, tokens = step.layout.extend_lens, step.layout.num_tokens
        assert view.prefix_lens.tolist() == list(step.prefix_lens_bound)
        assert view.extend_lens.tolist() == list(extends)
        assert view.kv_lens.tolist() == list(step.kv_lens_bound)
        assert view.cu_seqlens_q.tolist() == [sum(extends[:n]) for n in range(len(extends) + 1)]
        assert view.positions.shape == view.req_ids.shape == view.input_ids.shape == (tokens,)
        assert view.mask is step.mask
        self.compared += 1
        return self._inner.plan(view, buffers[0])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Any, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        return self._inner.forward(q, k, v, layer, plan, part)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", [eagle3, standalone])
def test_the_host_plans_each_pass_with_the_lengths_it_has(
    tiny: TinyModel, drafter: Any, shape: DraftShape
) -> None:
    backend = PlannedTwice()
    make = drafter(tiny, shape, backend=backend)
    driver = prefilled(tiny, shape, make, backend=HostPlannedBackend()).driver
    before = backend.compared
    driver.rounds(ROWS, 2)
    driver.rounds(ROWS[:1], 1)
    passes = shape.num_steps + (drafter is standalone)
    assert backend.compared == before + 3 * passes
    assert not backend.steps, "a pass was planned on the host and never run"


def test_a_padded_row_does_not_advance(tiny: TinyModel) -> None:
    backend = PlannedTwice()
    make = standalone(tiny, CHAIN, backend=backend)
    driver = prefilled(tiny, CHAIN, make, backend=HostPlannedBackend()).driver
    rows = CHAIN.num_draft_tokens
    step = driver.make_step({2: rows})
    drafted = replace(step, mask=CHAIN.mask, is_round=True)
    driver.parts.proposer.host_plan(padded_step(drafted, (rows, rows)))
    (prefix,) = step.prefix_lens_bound
    planned = sorted(own.prefix_lens_bound for own in backend.steps.values())
    pads = (PAD_PREFIX_LEN,) * 2
    # Observed: all rows at once, from the prefix on; then the passes, one behind another.
    assert planned == sorted((prefix + ahead, *pads) for ahead in (0, 0, 1, 2))
