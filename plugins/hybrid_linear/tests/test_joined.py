"""The backend joined to every full-attention plugin of the repository: chunk planning reaches it (A8)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnplug import (
    AttentionBackend,
    AttentionKind,
    BackendContext,
    DType,
    HybridLinearBackend,
    KVPools,
    LayerSpec,
    LinearDims,
    LinearStatePool,
    MLADims,
    ModelSpec,
    SplitBackend,
    load_registry,
)
from attnplug.claims import ExtendPath
from attnplug.mla import ExtendPolicy, MLAAttention
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_hybrid_linear.torch_backend import TorchLinearBackend
from support.mla_scene import MLACase, MLAScene

for plugin in ("flashinfer_mla", "flashmla", "flashattention"):
    sys.path.append(str(Path(__file__).parents[2] / plugin / "tests"))
LINEAR = LayerSpec(0, AttentionKind.KDA, 2, 2, 16, 16, 0.25, linear=LinearDims(2, 2, 16, 16, 96, 4))


def flashinfer_mla(context: BackendContext) -> AttentionBackend:
    from attnplug_flashinfer_mla.backend import FlashInferMLABackend
    from reference_kernels import ReferenceKernels

    return FlashInferMLABackend(context, kernels=ReferenceKernels.of(context))


def flashmla(context: BackendContext) -> AttentionBackend:
    """It decodes, so it comes beside one that prefills."""
    from attnplug_flashmla.backend import FlashMLABackend
    from reference_flashmla import ReferenceFlashMLA

    return SplitBackend(flashinfer_mla(context), FlashMLABackend(context, kernels=ReferenceFlashMLA()))


def flashattention(context: BackendContext) -> AttentionBackend:
    from attnplug_flashattention.backend import FlashAttentionBackend
    from flash_references import reference

    return FlashAttentionBackend(context, kernels=reference("fa4"))


PLUGINS: dict[str, Callable[[BackendContext], AttentionBackend]] = {
    "torch_native": TorchNativeBackend,
    "flashinfer_mla": flashinfer_mla,
    "flashmla": flashmla,
    "flashattention": flashattention,
}
WITHOUT_HOOK = ("torch_native", "flashattention")


def test_every_plugin_that_serves_mla_is_here():
    """A new one is joined too, or this fails."""
    serving = {
        name
        for name, found in load_registry().backends.items()
        if found.source.distribution.startswith("attnplug") and AttentionKind.MLA in found.spec.capabilities.kinds
    }
    assert serving == set(PLUGINS)


@pytest.mark.parametrize("name", PLUGINS)
def test_planning_8218_rows_after_a_prefix_of_800(name):
    """A8: the regression that started it. Without the hook the plan would be an earlier batch's, of 800 rows."""
    case = MLACase(
        ((800, 8218),), page_size=64, heads=2, dims=MLADims(64, 128, 64), v_head_dim=128, dtype=DType.FLOAT32
    )
    joined: list[HybridLinearBackend] = []

    def build(context: BackendContext) -> AttentionBackend:
        states = LinearStatePool([LINEAR], num_slots=2, dtype=DType.FLOAT32, device="cpu")
        model = ModelSpec("joined", "test", (LINEAR, *context.model.layers), 1 << 20)
        own = BackendContext(
            **{
                **{field: getattr(context, field) for field in context.__slots__},
                "pools": KVPools(linear=states),
                "model": model,
            }
        )
        joined.append(HybridLinearBackend(PLUGINS[name](context), TorchLinearBackend(own), model))
        return joined[0]

    scene = MLAScene(case, "cpu", build)
    mla = MLAAttention(joined[0], scene.pool, ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=512))
    earlier = scene.batch()
    earlier.seq_lens_cpu = earlier.extend_seq_lens_cpu = earlier.seq_lens_cpu * 0 + 800
    mla.prepare(earlier)
    batch = scene.batch()
    mla.prepare(batch)
    first = batch.mla_plan.calls[0]
    assert first.query_indptr[-1] == 8218
    if name in WITHOUT_HOOK:
        assert batch.chunk_plan is None  # nothing to plan
    else:
        assert batch.chunk_plan.query_rows == 8218
        assert batch.chunk_plan.metadata[0].lease.kernel.call is first
