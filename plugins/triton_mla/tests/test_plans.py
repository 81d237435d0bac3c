"""Plans as values, and refused batches: on a CPU with interpreted kernels, on a GPU with compiled ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import SCRATCH, ForwardMode, PlanError
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.case import LAYER
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import mla
from attnplug_testing.references.triton_mla import scene

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
INF = float("inf")
on_every_device = pytest.mark.parametrize("device", DEVICES)


class TestPlans:
    @pytest.mark.parametrize("device", DEVICES[1:])
    @pytest.mark.parametrize("mode", [DECODE, EXTEND])
    def test_planning_and_running_wait_for_nothing(self, mode, device):
        """No length is on the host, so none could be copied from it either."""
        stage = scene(mla(((90, 1), (5, 1)), mode, heads=2, padding=1, exact=False), device)
        stage.results()  # compiles
        batch = stage.batch()
        with nothing_waits(device):
            out = stage.forward(stage.plan(batch))
        assert batch.plan.attention.kv_rows is None
        assert relative_error(out[:2], stage.wanted()[0]) <= stage.tolerance and (out[2] == 0).all()

    @on_every_device
    @pytest.mark.parametrize(
        ("mode", "given"),
        [(DECODE, ((90, 1), (5, 1))), (VERIFY, ((90, 3), (5, 3))), (EXTEND, ((9, 4),)), (EXTEND, ((9, 2), (0, 3)))],
    )
    def test_lengths_on_the_host_change_nothing(self, mode, given, device):
        """``needs_cpu_seq_lens`` is false, so plans depend on the lengths on the device only."""
        made = []
        for exact in (True, False):
            stage = scene(mla(given, mode, heads=2, exact=exact), device)
            assert not stage.backend.claims.needs_cpu_seq_lens
            batch = stage.batch()
            plan = stage.backend.init_forward_metadata(batch)
            schedule = plan.metadata.schedule
            schedule.numbers.fill_(-7)  # not all of them are written
            stage.backend.refill(plan, batch.geometry)
            numbers, slots = schedule.numbers.tolist(), plan.new_slots.tolist()
            made.append((plan.query_rows, schedule.shape, schedule.configuration, numbers, slots))
        assert made[0] == made[1]

    @on_every_device
    def test_a_request_of_length_0_gives_zero(self, device):
        """C4: -inf. Lengths are the device's: the host would have refused this one."""
        stage = scene(mla(((100, 1), (30, 1), (70, 1)), DECODE, heads=2, exact=False), device)
        batch = stage.batch()
        batch.geometry.seq_lens[1] = 0
        batch.geometry.page_table[1] = 1 << 30
        out, lse = stage.results(batch)
        assert relative_error(out[::2], stage.wanted()[0][::2]) <= stage.tolerance
        assert (out[1] == 0).all() and (lse[1] == -INF).all() and lse[::2].isfinite().all()
        assert stage.written() == sum(stage.totals) - 1

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (EXTEND, 2)])
    def test_lengths_that_the_page_table_cannot_hold_stay_inside(self, mode, new, device):
        """Lengths on the device cannot be checked first: nothing outside of the batch is read or written."""
        stage = scene(mla(((20, 1), (30, new)), mode, heads=2, exact=False), device)
        stage.pool.rows(LAYER).zero_()
        batch = stage.batch()
        table = batch.geometry.page_table[:, :1].contiguous()
        batch.geometry = replace(batch.geometry, page_table=table, max_seq_len=64)
        batch.geometry.seq_lens[0] = 10_000
        if mode is EXTEND:
            batch.geometry.new_lens[1] = 500
        out, _ = stage.results(batch)
        assert out.isfinite().all()
        page, offset = (stage.pool.rows(LAYER)[:, :, 0] != 0).any(-1).nonzero().unbind(-1)
        assert (page.tolist(), offset.tolist()) == ([int(stage.page_table[1, 0])] * new, [30, 31][:new])

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (EXTEND, 3)])
    def test_new_rows_go_where_the_host_says(self, mode, new, device):
        """-1 is padding, which is not written. The cache is still read by the page table."""
        stage = scene(mla(((100, 1), (30, new)), mode, heads=2), device)
        stage.store(LAYER, [(0, total) for total in stage.totals])
        batch = stage.batch()
        nowhere = int(stage.pool.rows(LAYER).isnan().all(-1).flatten().nonzero()[0])  # an unused slot
        slots = torch.tensor([nowhere] + [-1] * new, device=device)
        batch.geometry = replace(batch.geometry, slots=slots)
        before = stage.pool.rows(LAYER).clone()
        out, _ = stage.results(batch)
        assert relative_error(out, stage.wanted()[0]) <= stage.tolerance
        changed = (stage.pool.rows(LAYER).nan_to_num(7) != before.nan_to_num(7)).any(-1).flatten()
        assert changed.nonzero().flatten().tolist() == [nowhere]


class TestMemory:
    def test_all_of_it_is_the_workspaces_and_none_depends_on_the_batch(self):
        """A2: taken when the backend is built, so that it can be frozen before graphs are captured."""
        stage = scene(mla(((100, 1), (30, 1)), DECODE, heads=2), "cpu")
        stage.workspace.freeze()
        before = stage.workspace.nbytes
        stage.results()
        assert stage.workspace.nbytes == before
        assert [(use.kind, use.zeroed) for use in stage.workspace.report()] == [
            ("scratch", False),
            ("triton-mla-counters", True),
        ]

    def test_memory_that_another_backend_made_larger_is_not_held_twice(self):
        """A2"""
        stage = scene(mla(((100, 1), (30, 1)), DECODE, heads=2), "cpu")
        first, _ = stage.results()
        before = stage.workspace.nbytes
        stage.workspace.request("another", "cpu", SCRATCH, before * 2)
        assert torch.equal(stage.results()[0], first)
        assert stage.workspace.report()[0].retired_bytes == 0

    def test_no_plan_of_splits_asks_for_more_than_was_reserved(self):
        """A2: nor for levels of invariance, whose partial results are limited instead."""
        stage = scene(mla(((5, 1),) * 40, DECODE, heads=2, levels=frozenset({"run", "batch"})), "cpu")
        stage.workspace.freeze()
        stage.backend.init_forward_metadata(stage.batch())


class TestWrongUse:
    def test_more_work_than_can_be_counted_is_refused(self):
        stage = scene(mla(((20, 2), (9, 1)), EXTEND, heads=4, exact=False), "cpu")
        batch = stage.batch()
        table = torch.zeros(2, 1 << 18, dtype=torch.int32)
        batch.geometry = replace(batch.geometry, page_table=table, rows=1 << 20)
        with raises_naming(PlanError, 1048576) as caught:
            stage.backend.init_forward_metadata(batch)
        assert caught.value.settings == ("chunked_prefill_size",)
