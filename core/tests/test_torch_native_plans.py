"""torch_native's plans: what a run writes, keeps and shares, and every batch that does not fit its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, ForwardBatch, ForwardExtras, ForwardMode, Geometry, PlanError
from attnplug.host import plan_forward
from support.batches import padded
from support.devices import nothing_waits
from support.stage import NAN, Case, Stage, error


def test_new_rows_are_written_where_the_page_table_says_and_nowhere_else():
    case = Case(((15, 4), (0, 3)), padding=2)
    stage = Stage(case, "cpu")
    stage.run()
    memory = stage.pools.mha.keys(3)
    written = torch.zeros(memory.shape[:2], dtype=torch.bool)
    for request, total in enumerate(stage.totals):
        for position in range(total):
            page, offset = stage.page_table[request, position // 16], position % 16
            assert torch.equal(memory[page, offset], stage.keys[request][position])
            written[page, offset] = True
    assert memory[~written].isnan().all(), "padding rows and other pages stay as they were (B5)"


def test_rows_already_in_the_cache_need_not_be_written_again():
    stage = Stage(Case(((15, 4), (0, 3))), "cpu")
    first, _ = stage.run()
    stage.keys = [torch.full_like(keys, NAN) for keys in stage.keys]
    second, _ = stage.run(save_kv_cache=False)
    assert torch.equal(first, second)


def test_several_layers_share_one_plan():
    stage = Stage(Case(((5, 3), (0, 2))), "cpu")
    batch = stage.batch()
    plan_forward(stage.backend, batch)
    assert torch.equal(stage.run(batch)[0], stage.run(batch)[0])


def test_idle_batch_gives_zeros_for_its_padding():
    """B5: an idle rank only pads."""
    stage = Stage(Case(((0, 1),)), "cpu")
    table = torch.zeros(0, 2, dtype=torch.int32)
    batch = padded(ForwardBatch(Geometry.of_lengths(ForwardMode.IDLE, table, [], [], 16)), 1)
    plan_forward(stage.backend, batch)
    out = stage.backend.forward_extend(stage.q, None, None, stage.layer, batch)
    assert out.shape == (1, 4, 16) and (out == 0).all()


def test_request_without_new_tokens_takes_no_part():
    stage = Stage(Case(((5, 3), (7, 0), (0, 2))), "cpu")
    out, _ = stage.run()
    wanted, _ = stage.wanted()
    assert error(out, wanted) <= 2e-6


class TestRefusals:
    def test_fewer_rows_than_planned(self):
        """B5: an error that gives both numbers."""
        stage = Stage(Case(((5, 3),)), "cpu")
        batch = stage.batch()
        plan_forward(stage.backend, batch)
        stage.q = stage.q[:2]
        with pytest.raises(PlanError, match=r"2 query rows.*3"):
            stage.run(batch)

    def test_plan_of_another_instance(self):
        """B5"""
        stage, other = Stage(Case(((5, 3),)), "cpu"), Stage(Case(((5, 3),)), "cpu")
        batch = stage.batch()
        plan_forward(other.backend, batch)
        with pytest.raises(PlanError, match="another instance"):
            stage.run(batch)

    def test_batch_whose_mode_changed(self):
        """B5"""
        stage = Stage(Case(((5, 1),), ForwardMode.EXTEND), "cpu")
        batch = stage.batch()
        plan_forward(stage.backend, batch)
        batch.geometry = replace(batch.geometry, mode=ForwardMode.DECODE)
        with pytest.raises(PlanError, match=r"extend.*decode"):
            stage.backend.forward_decode(stage.q, None, None, stage.layer, batch, save_kv_cache=False)

    def test_upper_bounds_of_the_lengths_are_not_enough(self):
        """It claims needs_cpu_seq_lens, and never copies them from the device by itself."""
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.geometry = replace(batch.geometry, host=None)
        with pytest.raises(PlanError, match="the backend needs exact ones"):
            plan_forward(stage.backend, batch)
        batch.geometry = batch.geometry.measured()
        assert error(stage.run(batch)[0], stage.wanted()[0]) <= 2e-6

    def test_nothing_to_write_must_be_said(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        plan_forward(stage.backend, batch)
        with pytest.raises(BackendError, match="save_kv_cache=False"):
            stage.backend.forward_extend(stage.q, None, None, stage.layer, batch)

    def test_lse_of_the_wrong_shape(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        plan_forward(stage.backend, batch)
        with pytest.raises(BackendError, match=r"\(3, 4\).*\(3, 5\)"):
            stage.backend.forward_extend(
                stage.q,
                None,
                None,
                stage.layer,
                batch,
                save_kv_cache=False,
                extras=ForwardExtras(lse=torch.zeros(3, 5)),
            )


def test_backend_keeps_nothing_of_a_batch():
    """B5: no backend keeps "the current metadata" on itself."""
    stage = Stage(Case(((5, 3),)), "cpu")
    before = dict(vars(stage.backend))
    stage.run()
    assert vars(stage.backend) == before


def test_two_batches_planned_before_either_runs_do_not_disturb_each_other():
    """B5: the plan belongs to the batch."""
    stage = Stage(Case(((5, 3), (0, 4))), "cpu")
    alone, _ = stage.run()
    first, second = stage.batch().split(1)
    plan_forward(stage.backend, first)
    plan_forward(stage.backend, second)
    late = stage.backend.forward_extend(stage.q[3:], None, None, stage.layer, second, save_kv_cache=False)
    early = stage.backend.forward_extend(stage.q[:3], None, None, stage.layer, first, save_kv_cache=False)
    torch.testing.assert_close(torch.cat([early, late]), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_planning_copies_nothing_from_the_device_where_the_batch_has_its_lengths():
    stage = Stage(Case(((5, 3), (0, 4))), "cuda")
    batch = stage.batch()
    with nothing_waits("cuda"):
        plan_forward(stage.backend, batch)
    assert error(stage.run(batch)[0], stage.wanted()[0]) <= 2e-6
