"""Kernels lent to plans: a planning test with kernels that do nothing."""

from __future__ import annotations

from attnplug_flashinfer_mla.leases import Leases


class Kernel:
    ready = True


def test_planning_of_one_batch_after_another_takes_one_kernel():
    leases = Leases(Kernel)
    first = leases.lend()
    kernel = first.kernel
    del first
    assert leases.lend().kernel is kernel


def test_plans_that_live_at_the_same_time_have_kernels_of_their_own():
    """B5"""
    leases = Leases(Kernel)
    first, second = leases.lend(), leases.lend()
    assert first.kernel is not second.kernel


def test_a_kernel_whose_last_plan_is_still_on_its_way_is_left_alone():
    """Planning waits for nothing: it takes another, and this one again once it is done."""
    leases = Leases(Kernel)
    busy = leases.lend().kernel
    busy.ready = False
    other = leases.lend()
    assert other.kernel is not busy
    busy.ready = True
    assert leases.lend().kernel is busy
