"""Every backend of this repository that serves MLA, on the reference kernels that its own tests run on.

A new plugin adds a line to ``PLUGINS``; ``test_hybrid_chunk_planning.py`` fails as long as one is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from attnplug import (
    AttentionBackend,
    AttentionKind,
    BackendContext,
    DType,
    ExtendPath,
    LayerSpec,
    ModelSpec,
    Problem,
    RefusalCode,
    Serving,
)
from attnplug.host import KVPools, MLADims, load_registry
from attnplug.linear import LinearDims, LinearStatePool
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_flashattention.backend import FlashAttentionBackend
from attnplug_hybrid_linear.torch_backend import TorchLinearBackend
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import KernelCase
from attnplug_testing.references import (
    cutedsl_mla,
    flashattention,
    flashinfer_mla,
    flashmla,
    tokenspeed_mla,
    triton_mla,
    trtllm_mla,
)

_LINEAR = LayerSpec(0, AttentionKind.KDA, 2, 2, 16, 16, 0.25, linear=LinearDims(2, 2, 16, 16, 96, 4))
Build = Callable[[BackendContext], AttentionBackend]


@dataclass(frozen=True)
class Chunks:
    """Arguments of a chunk hook, and the settings that decide its answer."""

    serving: Serving
    path: ExtendPath
    prefix_chunks: int
    captured: bool
    disable_flashinfer_ragged: bool

    @property
    def runner(self) -> bool:
        """True if FlashInfer's chunk runner exists (A3)."""
        serving = self.serving
        return not (
            serving.skip_prefill or serving.disaggregation_mode == "decode" or serving.disable_chunked_prefix_cache
        )


@dataclass(frozen=True)
class MLAPlugin:
    """A backend under test.

    ``changes`` are the fields of a case that it needs, ``hook`` the parameters of its chunk hook (``None``: no hook).
    ``planned`` returns the number of calls that the hook plans, or ``None`` if it refuses.
    """

    build: Build
    changes: dict[str, Any]
    hook: tuple[str, ...] | None
    planned: Callable[[Chunks], int | None]
    prefills: bool = True
    decodes: bool = True
    as_mha: bool = True
    """It can run an extend as MHA, not only in latent space."""
    prefills_always: bool = False
    """Also in a draft worker, which needs no prefill."""

    def case(self, case: KernelCase) -> KernelCase:
        return replace(case, **self.changes)


def _flashattention(context: BackendContext) -> AttentionBackend:
    kernels = flashattention.reference("fa4")
    return FlashAttentionBackend(declaring(context, "flashattention"), kernels=kernels)


def _every_call(asked: Chunks) -> int | None:
    """flashinfer_mla plans every call that runs as MHA, and refuses chunks if it has no runner for them."""
    if asked.path is ExtendPath.ABSORBED:
        return 0
    if asked.prefix_chunks and not asked.runner:
        return None
    return asked.prefix_chunks + (not asked.disable_flashinfer_ragged)


def _fallback_calls(asked: Chunks) -> int | None:
    """A4: chunks of a captured prefill, or if chunks are disabled; refused if there is no runner for them."""
    if not (asked.captured or asked.serving.disable_chunked_prefix_cache) or not asked.prefix_chunks:
        return 0
    return asked.prefix_chunks if asked.runner else None


def _all_calls(asked: Chunks) -> int:
    return 0 if asked.path is ExtendPath.ABSORBED else asked.prefix_chunks + 1


def _nothing(asked: Chunks) -> int:
    return 0


_NARROW = {"mla": MLADims(64, 128, 64), "dtype": DType.FLOAT32}
_FP8 = {"kv_dtype": DType.FLOAT8_E4M3}
PLUGINS: dict[str, MLAPlugin] = {
    "torch_native": MLAPlugin(TorchNativeBackend, _NARROW, None, _nothing, prefills_always=True),
    "flashinfer_mla": MLAPlugin(
        flashinfer_mla.build, _NARROW, ("forward_batch", "disable_flashinfer_ragged"), _every_call
    ),
    "flashattention": MLAPlugin(_flashattention, {}, None, _nothing, decodes=False, prefills_always=True),
    "flashmla": MLAPlugin(flashmla.build, {"dtype": DType.FLOAT32}, None, _nothing, prefills=False),
    "trtllm_mla": MLAPlugin(trtllm_mla.reference_trtllm, {}, ("forward_batch",), _fallback_calls),
    "tokenspeed_mla": MLAPlugin(tokenspeed_mla.reference_tokenspeed, _FP8, ("forward_batch",), _fallback_calls),
    "cutedsl_mla": MLAPlugin(cutedsl_mla.reference_cutedsl, {}, ("forward_batch",), _nothing, prefills=False),
    "triton_mla": MLAPlugin(triton_mla.build, _NARROW, ("forward_batch",), _all_calls, prefills_always=True),
}


_DENSE = LayerSpec(0, AttentionKind.MLA, 16, 16, 192, 128, 0.25, mla=MLADims(512, 128, 64))


def serving_mla() -> set[str]:
    """The installed backends of this repository that claim MLA, and do not refuse a model for its dense layers."""
    dense = Problem(ModelSpec("dense", "test", (_DENSE,), 1 << 20))
    return {
        name
        for name, found in load_registry().backends.items()
        if found.source.distribution.startswith("attnplug")
        and AttentionKind.MLA in found.spec.capabilities.kinds
        and not any(reason.code is RefusalCode.FEATURE for reason in found.spec.refusals(dense))
    }


def joined(context: BackendContext, full: AttentionBackend) -> HybridLinearBackend:
    """Join a full-attention backend to one for linear layers, as in a hybrid model."""
    states = LinearStatePool([_LINEAR], num_slots=2, dtype=DType.FLOAT32, device="cpu")
    model = ModelSpec("joined", "test", (_LINEAR, *context.model.layers), 1 << 20)
    own = replace(context, pools=KVPools(linear=states), model=model)
    return HybridLinearBackend(full, TorchLinearBackend(declaring(own, "torch")), model)
