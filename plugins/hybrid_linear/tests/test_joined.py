"""The backend joined to every full-attention plugin of the repository: chunk planning reaches it (A8)."""

from __future__ import annotations

import pytest

from attnplug import AttentionBackend, BackendContext, ExtendPath
from attnplug.host import ExtendPolicy, HybridLinearBackend, MLAAttention
from support.mla_plugins import PLUGINS, joined, serving_mla
from support.mla_scene import MLACase, MLAScene


def test_every_plugin_that_serves_mla_is_here():
    """A new one is joined too, or this fails."""
    assert serving_mla() == set(PLUGINS)


@pytest.mark.parametrize("name", [name for name, plugin in PLUGINS.items() if plugin.prefills and plugin.as_mha])
def test_planning_8218_rows_after_a_prefix_of_800(name):
    """A8: the regression that started it. Without the hook the plan would be an earlier batch's, of 800 rows."""
    case = PLUGINS[name].case(MLACase(((800, 8218),), heads=2))
    backends: list[HybridLinearBackend] = []

    def build(context: BackendContext) -> AttentionBackend:
        backends.append(joined(context, PLUGINS[name].build(context)))
        return backends[0]

    scene = MLAScene(case, "cpu", build)
    mla = MLAAttention(backends[0], scene.pool, ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=512))
    earlier = scene.batch()
    earlier.seq_lens_cpu = earlier.extend_seq_lens_cpu = earlier.seq_lens_cpu * 0 + 800
    mla.prepare(earlier)
    batch = scene.batch()
    mla.prepare(batch)
    first = batch.mla_plan.calls[0]
    assert first.query_indptr[-1] == 8218
    if name == "flashinfer_mla":
        assert batch.chunk_plan.query_rows == 8218
        assert batch.chunk_plan.metadata[0].lease.kernel.call is first
    else:
        assert batch.chunk_plan is None  # no hook, or nothing that a hook has to plan
