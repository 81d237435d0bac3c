"""Slots of linear states: zero when they are allocated, shared and copied as a whole."""

from __future__ import annotations

import pytest
import torch

from attnplug import AttentionKind, DType, LayerSpec, PoolError
from attnplug.linear import LinearDims, LinearStatePool
from attnplug_engine.scheduling.state_allocator import StateAllocator

LAYER = LayerSpec(0, AttentionKind.GDN, 2, 2, 4, 5, 1.0, linear=LinearDims(2, 1, 4, 5, 6, 3))


def allocator_over(num_slots: int = 3) -> tuple[StateAllocator, torch.Tensor]:
    pool = LinearStatePool([LAYER], num_slots=num_slots, dtype=DType.BFLOAT16, device="cpu")
    recurrent = pool.recurrent(0)
    assert recurrent is not None
    return StateAllocator(pool), recurrent


def test_an_allocated_slot_is_zero() -> None:
    states, recurrent = allocator_over()
    recurrent.fill_(torch.nan)
    slot = states.allocate()
    assert not recurrent[slot].any()
    assert recurrent[[other for other in range(3) if other != slot]].isnan().all()


def test_one_slot_too_many_names_their_number_and_the_option() -> None:
    states, _ = allocator_over(2)
    states.allocate()
    states.allocate()
    with pytest.raises(PoolError) as caught:
        states.allocate()
    assert "state_slots" in caught.value.settings


def test_a_shared_slot_is_free_only_after_its_last_release() -> None:
    states, _ = allocator_over()
    slot = states.allocate()
    states.share(slot)
    states.release(slot)
    assert (states.references(slot), states.free_slots) == (1, 2)
    states.release(slot)
    assert (states.free_slots, states.num_slots) == (3, 3)


def test_a_slot_is_not_released_twice() -> None:
    states, _ = allocator_over()
    slot = states.allocate()
    states.release(slot)
    with pytest.raises(PoolError):
        states.release(slot)


def test_a_shared_slot_can_be_copied_from_and_not_to() -> None:
    states, recurrent = allocator_over()
    shared, other = states.allocate(), states.allocate()
    states.share(shared)
    states.copy(shared, other)
    recurrent[other] = 1.0
    with pytest.raises(PoolError):
        states.copy(other, shared)
    assert not recurrent[shared].any()


def test_free_slots_are_not_copied() -> None:
    states, _ = allocator_over()
    slot = states.allocate()
    free = next(s for s in range(3) if s != slot)
    for source, target in ((free, slot), (slot, free), (slot, 3)):
        with pytest.raises(PoolError):
            states.copy(source, target)
