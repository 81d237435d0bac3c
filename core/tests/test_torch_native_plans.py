"""torch_native's plans: what a run writes, keeps and shares, and every batch that does not fit its plan."""

from __future__ import annotations

import pytest
import torch

from attnplug import BackendError, ForwardBatch, ForwardExtras, ForwardMode, PlanError
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
    batch.plan = stage.backend.init_forward_metadata(batch)
    assert torch.equal(stage.run(batch)[0], stage.run(batch)[0])


def test_idle_batch_gives_zeros_for_its_padding():
    """B5: an idle rank only pads."""
    stage = Stage(Case(((0, 1),)), "cpu")
    batch = replace_batch(stage.batch(), ForwardMode.IDLE, requests=0)
    batch.plan = stage.backend.init_forward_metadata(batch)
    out = stage.backend.forward_extend(stage.q, None, None, stage.layer, batch)
    assert out.shape == (1, 4, 16) and (out == 0).all()


def replace_batch(batch: ForwardBatch, mode: ForwardMode, requests: int) -> ForwardBatch:
    return ForwardBatch(mode, batch.input_ids[:0], batch.page_table[:requests], batch.seq_lens[:requests])


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
        batch.plan = stage.backend.init_forward_metadata(batch)
        stage.q = stage.q[:2]
        with pytest.raises(PlanError, match=r"2 query rows.*3"):
            stage.run(batch)

    def test_plan_of_another_instance(self):
        """B5"""
        stage, other = Stage(Case(((5, 3),)), "cpu"), Stage(Case(((5, 3),)), "cpu")
        batch = stage.batch()
        batch.plan = other.backend.init_forward_metadata(batch)
        with pytest.raises(PlanError, match="another instance"):
            stage.run(batch)

    def test_batch_whose_mode_changed(self):
        """B5"""
        stage = Stage(Case(((5, 1),), ForwardMode.EXTEND), "cpu")
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        batch.forward_mode = ForwardMode.DECODE
        with pytest.raises(PlanError, match=r"extend.*decode"):
            stage.backend.forward_decode(stage.q, None, None, stage.layer, batch, save_kv_cache=False)

    def test_more_new_tokens_than_rows(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.seq_lens_cpu = batch.seq_lens = torch.tensor([2], dtype=torch.int32)
        with pytest.raises(PlanError, match=r"request 0 has 3 new tokens but only 2 rows"):
            stage.backend.init_forward_metadata(batch)

    def test_page_table_too_narrow(self):
        stage = Stage(Case(((40, 3),)), "cpu")
        batch = stage.batch()
        batch.page_table = batch.page_table[:, :2]
        with pytest.raises(PlanError, match=r"43 rows.*2 pages of 16, 32 rows"):
            stage.backend.init_forward_metadata(batch)

    def test_fewer_input_rows_than_new_tokens(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.input_ids = batch.input_ids[:2]
        with pytest.raises(PlanError, match=r"2 input rows for 3 new tokens"):
            stage.backend.init_forward_metadata(batch)

    def test_extend_without_its_lengths(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.extend_seq_lens = batch.extend_seq_lens_cpu = None
        with pytest.raises(PlanError, match="extend_seq_lens"):
            stage.backend.init_forward_metadata(batch)

    def test_nothing_to_write_must_be_said(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        with pytest.raises(BackendError, match="save_kv_cache=False"):
            stage.backend.forward_extend(stage.q, None, None, stage.layer, batch)

    def test_lse_of_the_wrong_shape(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        with pytest.raises(BackendError, match=r"\(3, 5\).*\(3, 4\)"):
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
    first.plan = stage.backend.init_forward_metadata(first)
    second.plan = stage.backend.init_forward_metadata(second)
    late = stage.backend.forward_extend(stage.q[3:], None, None, stage.layer, second, save_kv_cache=False)
    early = stage.backend.forward_extend(stage.q[:3], None, None, stage.layer, first, save_kv_cache=False)
    torch.testing.assert_close(torch.cat([early, late]), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_planning_copies_nothing_from_the_device_where_the_batch_has_its_lengths():
    stage = Stage(Case(((5, 3), (0, 4))), "cuda")
    batch = stage.batch()
    with nothing_waits("cuda"):
        batch.plan = stage.backend.init_forward_metadata(batch)
    assert error(stage.run(batch)[0], stage.wanted()[0]) <= 2e-6
