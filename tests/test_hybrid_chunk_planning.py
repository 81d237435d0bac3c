"""Linear attention joined to every full-attention plugin of the repository: chunk planning reaches it (A8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import AttentionBackend, BackendContext, ExtendPath, ForwardBatch
from attnplug.host import ExtendPolicy, ModelAttention
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_testing.batches import geometry
from attnplug_testing.kernel_scene import KernelScene, mla
from mla_plugins import PLUGINS, joined, serving_mla


def test_every_plugin_that_serves_mla_is_here():
    """A new one is joined too, or this fails."""
    assert serving_mla() == set(PLUGINS)


@pytest.mark.parametrize("name", [name for name, plugin in PLUGINS.items() if plugin.prefills and plugin.as_mha])
@pytest.mark.sample(2)
def test_planning_8218_rows_after_a_prefix_of_800(name):
    """A8: the regression that started it. Without the hook the plan would be an earlier batch's, of 800 rows."""
    case = PLUGINS[name].case(mla(((800, 8218),), heads=2))
    backends: list[HybridLinearBackend] = []

    def build(context: BackendContext) -> AttentionBackend:
        backends.append(joined(context, PLUGINS[name].build(context)))
        return backends[0]

    scene = KernelScene(case, "cpu", build)
    policy = ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=512)
    attention = ModelAttention(backends[0], scene.pools, policy)
    earlier = ForwardBatch(geometry(case.mode, scene.page_table, [800], [800], case.page_size))
    batch = scene.batch()
    for each in (earlier, batch):
        each.geometry = replace(each.geometry, state_slots=torch.tensor([1]))
        attention.plan(each)
    first = batch.geometry.calls[0]
    assert first.query_lens == (8218,) and batch.plan.extend.query_rows == 8218
    chunks = batch.plan.chunks
    if name == "flashinfer_mla":
        assert chunks.query_rows == 8218
        assert chunks.metadata[0].handle.kernel.call is first
    elif name == "triton_mla":
        assert chunks.query_rows == 8218 and chunks.metadata[0][0] is first
    else:
        assert chunks is None  # no hook, or nothing that a hook has to plan
