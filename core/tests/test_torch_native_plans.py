"""torch_native's plans: what a run writes, keeps and shares, and the refusal of batches that do not fit their plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, ForwardExtras, PlanError
from attnplug.host import plan_forward
from attnplug_testing.devices import nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.stage import Stage, error, small


class TestRefusals:
    def test_upper_bounds_of_the_lengths_are_not_enough(self):
        """It claims needs_cpu_seq_lens, and never copies them from the device by itself."""
        stage = Stage(small(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.geometry = replace(batch.geometry, host=None)
        with raises_naming(PlanError, "exact"):
            plan_forward(stage.backend, batch)
        batch.geometry = batch.geometry.with_host_lengths()
        assert error(stage.results(batch)[0], stage.wanted()[0]) <= 2e-6

    def test_nothing_to_write_must_be_said(self):
        stage = Stage(small(((0, 3),)), "cpu")
        batch = stage.batch()
        plan_forward(stage.backend, batch)
        with raises_naming(BackendError, "save_kv_cache=False"):
            stage.backend.forward_extend(stage.q, None, None, stage.layer, batch)

    def test_lse_of_the_wrong_shape(self):
        stage = Stage(small(((0, 3),)), "cpu")
        batch = stage.batch()
        plan_forward(stage.backend, batch)
        with raises_naming(BackendError, (3, 4), (3, 5)):
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
    stage = Stage(small(((5, 3),)), "cpu")
    before = dict(vars(stage.backend))
    stage.results()
    assert vars(stage.backend) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_planning_copies_nothing_from_the_device_where_the_batch_has_its_lengths():
    stage = Stage(small(((5, 3), (0, 4))), "cuda")
    batch = stage.batch()
    with nothing_waits("cuda"):
        plan_forward(stage.backend, batch)
    assert error(stage.results(batch)[0], stage.wanted()[0]) <= 2e-6
