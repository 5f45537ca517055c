"""Slot 0 stays zeros."""

import pytest

from stagecoach.cache.state_slots import ZERO_SLOT, StateSlots


def test_the_zero_slot_is_never_handed_out() -> None:
    slots = StateSlots(4)
    assert slots.num_total == 3
    assert ZERO_SLOT not in slots.take(3)
    with pytest.raises(AssertionError, match="state slot 0 freed while free"):
        slots.free([ZERO_SLOT])


def test_a_pool_without_a_usable_slot_is_refused() -> None:
    with pytest.raises(AssertionError, match="no slot beside the zero slot"):
        StateSlots(1)
