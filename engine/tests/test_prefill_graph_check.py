"""Backends that claim to capture prefills and cannot are found when they are captured (B2)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captured_prefills import HYBRIDS, MODELS, AnyLinear, captured, engine
from refilled_native import AnyBatch

from attnplug import BackendError, ForwardBatch
from attnplug_engine.graphs.capture_check import CaptureMismatch
from attnplug_testing.errors import having

pytestmark = pytest.mark.usefixtures("native")


class StaleLengths(AnyBatch):
    """Keeps the new lengths of its first batch."""

    def refill(self, plan, geometry):
        if geometry.new_lens is None or not plan.metadata.rows:
            super().refill(plan, geometry)


class EqualLengths(AnyBatch):
    """Faulty backend that assumes equally many new tokens in all requests."""

    def refill(self, plan, geometry):
        if geometry.new_lens is not None:
            live = int((geometry.new_lens > 0).sum())
            news = geometry.new_lens.clone()
            news[:live] = news[:live].sum() // max(live, 1)
            geometry = replace(geometry, new_lens=torch.minimum(news, geometry.seq_lens))
        super().refill(plan, geometry)


class WritesPadding(AnyBatch):
    """Padded tokens are written to the first row of all."""

    def refill(self, plan, geometry):
        super().refill(plan, geometry)
        plan.new_slots.clamp_(min=0)


class StaleStateLengths(AnyLinear):
    """Keeps the new lengths of its first batch."""

    def _rows(self, batch):
        geometry = batch.geometry
        if geometry.captured and geometry.new_lens is not None and geometry.new_lens.any():
            self.first = getattr(self, "first", geometry.new_lens.clone())
            batch = ForwardBatch(replace(geometry, new_lens=self.first))
        yield from super()._rows(batch)


class KeepsPaddedStates(AnyLinear):
    """Advances the last slot by padded tokens."""

    def forward_linear(self, inputs, layer, batch):
        if batch.geometry.captured and batch.geometry.new_lens is not None:
            self._pool.recurrent(layer.layer_id)[-1] += 1
        return super().forward_linear(inputs, layer, batch)


@pytest.mark.parametrize(("linear", "fault"), [(StaleStateLengths, "result"), (KeepsPaddedStates, "writes")])
def test_a_linear_backend_that_claims_too_much_is_found_out(linear, fault, native):
    native(linear=linear)
    with pytest.raises(CaptureMismatch, check=having("naive_linear", "extend")) as caught:
        captured(engine(HYBRIDS[0], state_slots=9))
    assert caught.value.fault == fault and caught.value.kind.is_linear


class WritesBefore(AnyBatch):
    """Also writes the row before the new ones of the request that has the fewest."""

    def refill(self, plan, geometry):
        super().refill(plan, geometry)
        if geometry.new_lens is not None and (live := int((geometry.new_lens > 0).sum())):
            one = int(geometry.new_lens[:live].argmin())
            row = int(geometry.seq_lens[one] - geometry.new_lens[one]) - 1
            if row >= 0:
                page = int(geometry.page_table[one, row // geometry.page_size])
                self.context.pools.mha.keys(0)[page, row % geometry.page_size] = 3.0


def test_a_row_before_the_new_ones_is_not_the_captured_extends_to_write(native):
    native(WritesBefore)
    with pytest.raises(BackendError, check=having("22 tokens", "writes", settings=("disable_cuda_graph",))):
        captured(engine(), (22,))


@pytest.mark.parametrize(
    ("kind", "faults"),
    [(StaleLengths, {"result"}), (EqualLengths, {"result", "writes"}), (WritesPadding, {"writes"})],
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sample(3)
def test_a_backend_that_claims_too_much_is_found_out(model, kind, faults, native):
    native(kind)
    with pytest.raises(CaptureMismatch, check=having("cuda_graph ALWAYS", "extend")) as caught:
        captured(engine(model))
    assert caught.value.fault in faults
