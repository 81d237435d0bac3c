"""Kernels lent to plans: a planning test with kernels that do nothing."""

from __future__ import annotations

from attnplug_flashinfer_mla.kernel_pool import KernelPool


class Kernel:
    ready = True


def test_planning_of_one_batch_after_another_takes_one_kernel():
    pool = KernelPool(Kernel)
    first = pool.acquire()
    kernel = first.kernel
    del first
    assert pool.acquire().kernel is kernel


def test_plans_that_live_at_the_same_time_have_kernels_of_their_own():
    """B5"""
    pool = KernelPool(Kernel)
    first, second = pool.acquire(), pool.acquire()
    assert first.kernel is not second.kernel


def test_a_kernel_whose_last_plan_is_still_on_its_way_is_left_alone():
    """Planning waits for nothing: it takes another, and this one again once it is done."""
    pool = KernelPool(Kernel)
    busy = pool.acquire().kernel
    busy.ready = False
    other = pool.acquire()
    assert other.kernel is not busy
    busy.ready = True
    assert pool.acquire().kernel is busy
