"""Captured decodes with different backends for MLA prefill and decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendContext, ForwardBatch, ForwardMode, GraphLevel
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_conformance.checks.graphs import Capture
from attnplug_testing.kernel_scene import KernelScene, check_replay, mla
from mla_plugins import PLUGINS


@pytest.mark.parametrize("name", ["flashmla", "flashinfer_mla", "triton_mla"])
def test_a_decode_is_captured_beside_flashattentions_prefill(name):
    """A9: the decode backend owns the graphs, and the prefill backend does not prevent them."""

    def build(context: BackendContext) -> SplitBackend:
        split = SplitBackend(PLUGINS["flashattention"].build(context), PLUGINS[name].build(context))
        assert split.claims.cuda_graph is GraphLevel.DECODE
        return split

    case = PLUGINS[name].case(mla(((100, 1),) * 3, ForwardMode.DECODE, heads=4))
    capture = Capture(KernelScene(case, "cpu", build)).reserve().capture()
    for lengths in (((90, 1), (5, 1), (64, 1)), ((63, 1),)):
        check_replay(capture, KernelScene(replace(case, lengths=lengths), "cpu", build))


@pytest.mark.parametrize(
    "name", [name for name, plugin in PLUGINS.items() if plugin.decodes and name != "torch_native"]
)
def test_graphs_of_one_shape_write_to_their_own_slots(name):
    """B5: every graph has its own memory, so the second capture does not write to slots of the first."""
    plugin = PLUGINS[name]
    case = plugin.case(mla(((70, 1), (9, 1)), ForwardMode.DECODE, page_size=64, heads=16))
    stage = KernelScene(case, "cpu", plugin.build)
    stage.backend.init_cuda_graph_state(2, 2)
    for slots in (None, [5, 7], [11, -1], None):
        given = None if slots is None else torch.tensor(slots)
        batch = ForwardBatch(replace(stage.batch().geometry, host=None, captured=True, slots=given))
        plan = stage.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        stage.backend.init_forward_metadata_in_graph(batch)
        wanted = batch.geometry.new_slots() if slots is None else given
        assert plan.new_slots.tolist() == wanted.tolist()
