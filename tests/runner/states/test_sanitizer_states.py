"""The sanitizer over states: a fault of the field each, and what the report says."""

import pytest
import torch
from example_state_backend import PART, SumBackend
from faulty_backends import KeepsCounter, ReadsStaleScratch
from sum_model import DECAY
from tiny_drafters import CHAIN, standalone
from tiny_runner import random_prompts
from tiny_states import StateEngine, without_layers

from paceline.core.errors import SanitizerError
from paceline.runner.committers import StateSlots


class ReadsSlotZero(SumBackend):
    """A request that starts takes what slot 0 holds for its state."""

    def extend(self, inputs, layer, plan):
        before = layer.parts[PART].index_select(0, plan.group.read_slots.long())
        return super().extend(inputs, layer, plan) + 0 * before.index_select(0, plan.req_ids)


class ReadsANeighbour(SumBackend):
    """Another slot than its own, as where -1 wraps to the last one."""

    def extend(self, inputs, layer, plan):
        neighbour = layer.parts[PART].index_select(0, plan.group.write_slots.long() + 2)
        return super().extend(inputs, layer, plan) + 0 * neighbour.sum()


class WritesTheSharedSlot(SumBackend):
    """It writes where it read: into the prefix tree's slot."""

    def extend(self, inputs, layer, plan):
        sums = super().extend(inputs, layer, plan)
        layer.parts[PART][plan.group.read_slots.long()] += 1
        return sums


class KeepsOfTheRoundBefore(SumBackend):
    """What commit takes was kept by an earlier round."""

    def extend(self, inputs, layer, plan):
        kept = None if plan.kept is None else plan.kept.clone()
        sums = super().extend(inputs, layer, plan)
        if kept is not None:
            plan.kept.copy_(kept)
        return sums


def run(tiny, backend: SumBackend, **options: object) -> None:
    engine = StateEngine(tiny, states=backend, capture=False, **options)
    (prompt,) = random_prompts([19])
    engine.add(prompt, 6)
    engine.run()
    engine.add([*prompt, 9], 3)
    engine.run()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (ReadsSlotZero, r"kv\.sum\.sum: slot 0, of padded rows"),
        (ReadsANeighbour, r"kv\.sum\.sum: free slots and those of others"),
    ],
)
def test_a_backend_that_reads_what_is_not_its_own_is_named(tiny, kind, named):
    with pytest.raises(SanitizerError, match=named):
        run(tiny, kind(DECAY))


def test_a_slot_of_the_prefix_tree_that_is_written_is_found(tiny):
    with pytest.raises(
        SanitizerError,
        match=r"kv\.sum\.sum in the slots \[3\], which the step reads alone, must be as it was",
    ):
        run(tiny, WritesTheSharedSlot(DECAY))


def test_what_a_round_keeps_is_kept_in_that_round(tiny):
    with pytest.raises(SanitizerError, match=r"sum\.kept"):
        run(
            tiny,
            KeepsOfTheRoundBefore(DECAY),
            draft=CHAIN,
            make_proposer=standalone(tiny, CHAIN),
        )


def drafted(tiny, backend) -> None:
    """Rounds of a model none of whose layers attend, by a drafter whose layers run on `backend`."""
    engine = StateEngine(
        without_layers(tiny),
        num_slots=60,
        capture=False,
        draft=CHAIN,
        make_proposer=standalone(tiny, CHAIN, backend=backend),
    )
    engine.add(random_prompts([19])[0], 6)
    engine.run()
    assert any(step.is_round for step in engine.steps)


def test_what_the_drafters_backend_keeps_is_not_poisoned(tiny):
    drafted(tiny, KeepsCounter())
    with pytest.raises(SanitizerError, match=r"draft\.backend\.0\.scratch"):
        drafted(tiny, ReadsStaleScratch())


def test_a_state_that_stands_for_another_length_is_found_before_it_is_used(tiny, monkeypatch):
    engine = StateEngine(tiny, capture=False)
    (prompt,) = random_prompts([19])
    engine.add(prompt, 6)
    engine.run()
    engine.runner.parts.mixers[0].pool.lens.add_(1)
    engine.add([*prompt, 9], 3)
    with pytest.raises(
        SanitizerError,
        match="the slot of cache group 'sum' that row 1 reads must be one that stands for its "
        "16 tokens, got one that stands for 17; share a state under the length",
    ):
        engine.run()


def test_a_step_that_forgets_to_say_what_its_slots_stand_for_is_found(tiny, monkeypatch):
    commit = StateSlots.commit

    def forgets(committer, view, path, num_kept):
        lens = committer._mixer.pool.lens.clone()
        commit(committer, view, path, num_kept)
        committer._mixer.pool.lens.copy_(lens)

    monkeypatch.setattr(StateSlots, "commit", forgets)
    with pytest.raises(SanitizerError, match=r"kv\.sum\.lens: slots this step writes"):
        run(tiny, SumBackend(DECAY))


def test_guard_and_bytes_know_slots_and_kept_rows(tiny):
    engine = StateEngine(tiny, draft=CHAIN, make_proposer=standalone(tiny, CHAIN))
    named = engine.runner.parts.named_tensors()
    assert {"sum.kept", "sum.weights", "table.page_table.1", "step.state_lens"} <= named.keys()
    mixer = engine.runner.parts.mixers[0]
    places = {name for name, _, _ in engine.runner._guard._places}
    assert {"kv.sum.sum", "kv.sum.lens", "sum.kept"} <= places
    spec = mixer.pool.spec
    held = sum(t.nbytes for t in mixer.pool.named_tensors().values())
    assert held == mixer.pool.num_slots * spec.page_bytes(torch.float32.itemsize)
