"""Plans as values, and what is refused: on a CPU by interpreted kernels, on a GPU by compiled ones."""

from __future__ import annotations

import pytest
import torch

from attnplug import SCRATCH, ForwardExtras, ForwardMode, PlanError
from attnplug_triton_mla.options import TritonMLAOptions
from interpreted_mla import scene
from support.devices import DEVICES, nothing_waits
from support.mla_refusals import RefusedCalls
from support.mla_scene import LAYER, MLACase, MLAScene, relative_error

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
INF = float("inf")
on_every_device = pytest.mark.parametrize("device", DEVICES)


class TestPlans:
    @on_every_device
    @pytest.mark.parametrize("mode", [DECODE, EXTEND])
    def test_planning_and_running_wait_for_nothing(self, mode, device):
        """No length is on the host, so none could be copied from it either."""
        stage = scene(MLACase(((90, 1), (5, 1)), mode, heads=2, padding=1, cpu_lengths=False), device)
        stage.absorbed()  # compiles
        batch = stage.batch()
        with nothing_waits(device):
            out, _ = stage.absorbed(batch)
        assert batch.plan.kv_rows is None
        assert batch.plan.query_rows == (2 if mode is DECODE else 3)  # how many are padding is the device's to know
        assert relative_error(out[:2], stage.wanted_absorbed()[0]) <= 5e-3 and (out[2] == 0).all()

    @on_every_device
    def test_a_plan_says_what_the_host_knows(self, device):
        """B5"""
        stage = scene(MLACase(((9, 2), (0, 3)), EXTEND, heads=2, padding=1), device)
        plan = stage.backend.init_forward_metadata(stage.batch())
        assert (plan.query_rows, plan.kv_rows) == (5, 14)

    @on_every_device
    def test_two_plans_live_at_the_same_time(self, device):
        """B5: a plan is a value; what is planned later does not change it."""
        stage = scene(MLACase(((100, 1), (30, 1)), DECODE, heads=2), device)
        first, second = stage.batch(), stage.batch()
        first.plan = stage.backend.init_forward_metadata(first)
        second.seq_lens = second.seq_lens - 7
        second.seq_lens_cpu = second.seq_lens_cpu - 7
        second.plan = stage.backend.init_forward_metadata(second)
        out, _ = stage.absorbed(first)
        assert relative_error(out, stage.wanted_absorbed()[0]) <= 5e-3

    @on_every_device
    def test_a_request_of_length_0_gives_zero(self, device):
        """C4: -inf. Lengths are the device's: the host would have refused this one."""
        stage = scene(MLACase(((100, 1), (30, 1), (70, 1)), DECODE, heads=2, cpu_lengths=False), device)
        batch = stage.batch()
        batch.seq_lens[1] = 0
        batch.page_table[1] = 1 << 30
        out, lse = stage.absorbed(batch)
        assert relative_error(out[::2], stage.wanted_absorbed()[0][::2]) <= 5e-3
        assert (out[1] == 0).all() and (lse[1] == -INF).all() and lse[::2].isfinite().all()
        assert int((~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()) == sum(stage.totals) - 1

    @on_every_device
    @pytest.mark.parametrize("mode", [DECODE, EXTEND])
    def test_lengths_that_the_page_table_cannot_hold_stay_inside(self, mode, device):
        """What is on the device nobody can look at first: nothing outside of the batch is read or written."""
        stage = scene(MLACase(((20, 1), (30, 1)), mode, heads=2, cpu_lengths=False), device)
        stage.pool.rows(LAYER).zero_()
        batch = stage.batch()
        batch.page_table = batch.page_table[:, :1].contiguous()
        batch.seq_lens[0] = 10_000
        if mode is EXTEND:
            batch.extend_seq_lens[1] = 500
        out, _ = stage.absorbed(batch)
        assert out.isfinite().all()
        page, offset = (stage.pool.rows(LAYER)[:, :, 0] != 0).any(-1).nonzero().unbind(-1)
        assert (page.tolist(), offset.tolist()) == ([int(stage.page_table[1, 0])], [30])

    @on_every_device
    def test_an_idle_rank_plans_and_runs_nothing(self, device):
        """B5: rows that a collective asks for are padding."""
        stage = scene(MLACase((), ForwardMode.IDLE, padding=3), device)
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        q, lse = stage.padded(stage.q), torch.zeros(3, 16, device=device)
        rows = q[:, :1].contiguous()
        out = stage.backend.forward_decode(q, rows, None, stage.layer, batch, extras=ForwardExtras(lse=lse))
        assert out.shape == (3, 16, stage.case.dims.kv_lora_rank) and (out == 0).all() and (lse == -INF).all()
        assert stage.pool.rows(LAYER).isnan().all()

    @on_every_device
    def test_nothing_is_written_where_nothing_is_to_be_saved(self, device):
        stage = scene(MLACase(((100, 1), (30, 1)), DECODE, heads=2), device)
        stage.store(stage.rows, [(0, total) for total in stage.totals])
        before = stage.pool.rows(LAYER).clone()
        out, _ = stage.absorbed(save_kv_cache=False)
        assert relative_error(out, stage.wanted_absorbed()[0]) <= 5e-3
        assert torch.equal(stage.pool.rows(LAYER).nan_to_num(7), before.nan_to_num(7))


class TestMemory:
    def test_all_of_it_is_the_workspaces_and_none_depends_on_the_batch(self):
        """A2: taken when the backend is built, so that it can be frozen before graphs are captured."""
        stage = scene(MLACase(((100, 1), (30, 1)), DECODE, heads=2), "cpu")
        stage.workspace.freeze()
        before = stage.workspace.nbytes
        stage.absorbed()
        assert stage.workspace.nbytes == before
        assert [(use.kind, use.zeroed) for use in stage.workspace.report()] == [
            ("scratch", False),
            ("triton-mla-counters", True),
        ]

    def test_memory_that_another_backend_made_larger_is_not_held_twice(self):
        """A2"""
        stage = scene(MLACase(((100, 1), (30, 1)), DECODE, heads=2), "cpu")
        first, _ = stage.absorbed()
        before = stage.workspace.nbytes
        stage.workspace.request("another", "cpu", SCRATCH, before * 2)
        assert torch.equal(stage.absorbed()[0], first)
        assert stage.workspace.report()[0].retired_bytes == 0

    def test_invariance_asks_for_memory_of_every_request(self):
        options = TritonMLAOptions(batch_invariant=True)
        stage = scene(MLACase(((5, 1),) * 40, DECODE, heads=2, options=options), "cpu")
        before = stage.workspace.nbytes
        stage.backend.init_forward_metadata(stage.batch())
        assert stage.workspace.nbytes > before


class TestWrongUse(RefusedCalls):
    def stage(self, mode: ForwardMode = DECODE, *lengths: tuple[int, int]) -> MLAScene:
        return scene(MLACase(lengths or ((20, 1), (9, 1)), mode, heads=4), "cpu")

    def test_a_page_table_that_is_too_narrow_is_refused(self):
        stage = self.stage(DECODE, (200, 1))
        batch = stage.batch()
        batch.page_table = batch.page_table[:, :2]
        with pytest.raises(PlanError, match="201 rows, but the page table holds 2 pages of 64"):
            stage.backend.init_forward_metadata(batch)

    def test_an_extend_needs_its_new_tokens(self):
        stage = self.stage(EXTEND)
        batch = stage.batch()
        batch.extend_seq_lens = batch.extend_seq_lens_cpu = None
        with pytest.raises(PlanError, match="mode extend needs extend_seq_lens"):
            stage.backend.init_forward_metadata(batch)

    def test_more_work_than_can_be_counted_is_refused(self):
        stage = self.stage(EXTEND)
        batch = stage.batch()
        batch.seq_lens_cpu = batch.extend_seq_lens_cpu = None
        batch.input_ids = torch.zeros(1 << 20, dtype=torch.int64)
        batch.page_table = torch.zeros(2, 1 << 18, dtype=torch.int32)
        with pytest.raises(PlanError, match=r"1048576 rows with 4 heads.*chunked_prefill_size"):
            stage.backend.init_forward_metadata(batch)
