"""Calls that every MLA backend refuses alike, by what core checks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, ForwardBatch, ForwardExtras, PlanError, PoolError
from support.mla_scene import MLAScene


class RefusedCalls:
    """For a test class that has ``stage()``: two requests to be decoded."""

    def stage(self) -> MLAScene:
        raise NotImplementedError

    def planned(self) -> tuple[MLAScene, ForwardBatch]:
        stage = self.stage()
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        return stage, batch

    def test_a_plan_of_another_instance_is_refused(self) -> None:
        """B5"""
        stage, other = self.stage(), self.stage()
        batch = stage.batch()
        batch.plan = other.backend.init_forward_metadata(other.batch())
        with pytest.raises(PlanError, match="another instance"):
            stage.absorbed(batch)

    def test_fewer_rows_than_planned_are_refused(self) -> None:
        """B5: with both numbers."""
        stage, batch = self.planned()
        with pytest.raises(PlanError, match="1 query rows, but the plan is for 2"):
            stage.backend.forward_decode(stage.q[:1], None, None, stage.layer, batch, save_kv_cache=False)

    def test_a_batch_is_run_by_the_entry_of_its_mode(self) -> None:
        stage, batch = self.planned()
        with pytest.raises(PlanError, match="call forward_decode"):
            stage.backend.forward_extend(stage.q, None, None, stage.layer, batch, save_kv_cache=False)

    def test_rows_to_be_saved_must_be_given(self) -> None:
        stage, batch = self.planned()
        forward = stage.backend.forward_decode
        rows = stage.new_rows().unsqueeze(1)
        with pytest.raises(BackendError, match="was given k=None, v=None; pass save_kv_cache=False"):
            forward(stage.q, None, None, stage.layer, batch)
        with pytest.raises(BackendError, match=r"writes k and no v"):
            forward(stage.q, rows, rows, stage.layer, batch)
        with pytest.raises(BackendError, match="1 rows of k for 2 planned ones"):
            forward(stage.q, rows[:1], None, stage.layer, batch)

    def test_other_heads_and_layers_are_refused(self) -> None:
        stage, batch = self.planned()
        heads = stage.q.shape[1]
        with pytest.raises(BackendError, match=f"q has {heads // 2} heads, but the plan is for {heads}"):
            stage.backend.forward_decode(stage.q[:, : heads // 2], None, None, stage.layer, batch, save_kv_cache=False)
        other = replace(stage.layer, layer_id=99)
        with pytest.raises(PoolError, match="layer 99 is not an MLA layer"):
            stage.backend.forward_decode(stage.q, None, None, other, batch, save_kv_cache=False)

    def test_a_log_sum_exp_of_the_wrong_shape_is_refused(self) -> None:
        """C4"""
        stage, batch = self.planned()
        heads = stage.q.shape[1]
        extras = ForwardExtras(torch.zeros(heads, 2))
        with pytest.raises(BackendError, match=rf"float32 of shape \(2, {heads}\) \(tokens, heads\)"):
            stage.backend.forward_decode(stage.q, None, None, stage.layer, batch, save_kv_cache=False, extras=extras)
