"""StagingRing: pinned slots by epoch."""

import numpy as np
import pytest

from paceline.core.errors import IntegrityError
from paceline.runner.staging import STEPS_IN_FLIGHT, StagingRing


def test_values_survive_until_the_slot_comes_round_again():
    ring = StagingRing(64, pinned=False, depth=2)
    first = ring.slot(0).put(np.array([1, 2, 3]))
    ring.slot(1).put(np.array([4, 5, 6]))
    assert first.tolist() == [1, 2, 3]
    ring.slot(2).put(np.array([7, 8, 9]))
    assert first.tolist() == [7, 8, 9]


def test_pieces_of_any_dtype_lie_apart_and_keep_their_shape():
    slot = StagingRing(128, pinned=False).slot(0)
    bytes_ = slot.put(np.array([1, 2, 3], dtype=np.uint8))
    longs = slot.put(np.array([[4, 5], [6, 7]]))
    assert (bytes_.tolist(), longs.tolist()) == ([1, 2, 3], [[4, 5], [6, 7]])


def test_a_full_slot_is_refused_with_both_sizes():
    slot = StagingRing(16, pinned=False).slot(0)
    with pytest.raises(
        IntegrityError, match=r"staged bytes of one step must be at most 16, got 24"
    ):
        slot.put(np.zeros(3, dtype=np.int64))


def test_the_step_that_is_staged_spares_those_in_flight():
    ring = StagingRing(64, pinned=False)
    staged = [ring.slot(epoch).put(np.array([epoch])) for epoch in range(STEPS_IN_FLIGHT + 1)]
    assert [values.item() for values in staged] == list(range(STEPS_IN_FLIGHT + 1))


def test_a_slot_that_comes_round_again_has_all_its_room():
    ring = StagingRing(64, pinned=False, depth=1)
    for epoch in range(3):
        ring.slot(epoch).put(np.zeros(8, dtype=np.int64))
