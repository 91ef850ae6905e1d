import pytest

from paceline.cache.overlay_slots import OverlaySlots
from paceline.core.errors import IntegrityError


def test_slots_come_back_when_the_last_step_that_reads_them_retires():
    slots = OverlaySlots(4)
    assert sorted(slots.reserve("a", 3)) == [1, 2, 3]  # slot 0 is nobody's
    assert not slots.has_room(2)
    assert slots.has_room(1)
    slots.release("a", epoch=5)
    slots.retire(4)
    assert (slots.counts().free, slots.counts().queued) == (1, 3)
    slots.retire(5)
    assert slots.has_room(4)
    slots.release("a", epoch=6)  # it holds nothing
    slots.check_integrity([])


def test_who_needs_no_slot_holds_none():
    slots = OverlaySlots(4)
    assert slots.reserve("a", 0) == []
    slots.check_integrity([])
    slots.reserve("a", 4)


def test_slots_of_a_request_that_left_are_missed():
    slots = OverlaySlots(4)
    slots.reserve("a", 2)
    slots.check_integrity(["a", "b"])
    with pytest.raises(IntegrityError, match="slots of the overlay must be 2 held by running"):
        slots.check_integrity(["b"])
