"""Every backend of this repository that serves MLA, on the reference kernels that its own tests run on.

A new plugin adds a line to ``PLUGINS``; whoever goes through them fails as long as one is missing.
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
from attnplug.host import HybridLinearBackend, KVPools, MLADims, load_registry
from attnplug.linear import LinearDims, LinearStatePool
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import KernelCase

_LINEAR = LayerSpec(0, AttentionKind.KDA, 2, 2, 16, 16, 0.25, linear=LinearDims(2, 2, 16, 16, 96, 4))
Build = Callable[[BackendContext], AttentionBackend]


@dataclass(frozen=True)
class Chunks:
    """What a chunk hook is asked for."""

    serving: Serving
    path: ExtendPath
    prefix_chunks: int
    captured: bool
    disable_flashinfer_ragged: bool

    @property
    def runner(self) -> bool:
        """Whether FlashInfer's chunk runner exists (A3)."""
        serving = self.serving
        return not (
            serving.skip_prefill or serving.disaggregation_mode == "decode" or serving.disable_chunked_prefix_cache
        )


@dataclass(frozen=True)
class MLAPlugin:
    """How to build one, what it changes in a case, the parameters of its chunk hook (``None``: it has none), and what
    the hook answers: the number of calls that it plans, or ``None`` for a refusal in words."""

    build: Build
    changes: dict[str, Any]
    hook: tuple[str, ...] | None
    planned: Callable[[Chunks], int | None]
    prefills: bool = True
    decodes: bool = True
    as_mha: bool = True
    """Not in latent space only."""
    prefills_always: bool = False
    """Also for a draft's worker, which asks nobody for it."""

    def case(self, case: KernelCase) -> KernelCase:
        return replace(case, **self.changes)


def _torch_native(context: BackendContext) -> AttentionBackend:
    from attnplug.host import TorchNativeBackend

    return TorchNativeBackend(context)


def _flashinfer_mla(context: BackendContext) -> AttentionBackend:
    from attnplug_testing.flashinfer_mla_reference import build

    return build(context)


def _flashattention(context: BackendContext) -> AttentionBackend:
    from attnplug_flashattention.backend import FlashAttentionBackend
    from attnplug_testing.flashattention_reference import reference

    return FlashAttentionBackend(declaring(context, "flashattention"), kernels=reference("fa4"))


def _flashmla(context: BackendContext) -> AttentionBackend:
    from attnplug_testing.flashmla_reference import build

    return build(context)


def _trtllm_mla(context: BackendContext) -> AttentionBackend:
    from attnplug_testing.trtllm_reference import reference_trtllm

    return reference_trtllm(context)


def _tokenspeed_mla(context: BackendContext) -> AttentionBackend:
    from attnplug_testing.tokenspeed_reference import reference_tokenspeed

    return reference_tokenspeed(context)


def _cutedsl_mla(context: BackendContext) -> AttentionBackend:
    from attnplug_testing.cutedsl_reference import reference_cutedsl

    return reference_cutedsl(context)


def _triton_mla(context: BackendContext) -> AttentionBackend:
    from attnplug_testing.interpreted_mla import build

    return build(context)


def _every_call(asked: Chunks) -> int | None:
    """flashinfer_mla plans whatever runs as MHA, and refuses chunks where it has no runner for them."""
    if asked.path is ExtendPath.ABSORBED:
        return 0
    if asked.prefix_chunks and not asked.runner:
        return None
    return asked.prefix_chunks + (not asked.disable_flashinfer_ragged)


def _what_falls_back(asked: Chunks) -> int | None:
    """A4: chunks of a captured prefill, or where they are disabled; refused where nobody is there to run them."""
    if not (asked.captured or asked.serving.disable_chunked_prefix_cache) or not asked.prefix_chunks:
        return 0
    return asked.prefix_chunks if asked.runner else None


def _nothing(asked: Chunks) -> int:
    return 0


_NARROW = {"mla": MLADims(64, 128, 64), "dtype": DType.FLOAT32}
_FP8 = {"kv_dtype": DType.FLOAT8_E4M3}
PLUGINS: dict[str, MLAPlugin] = {
    "torch_native": MLAPlugin(_torch_native, _NARROW, None, _nothing, prefills_always=True),
    "flashinfer_mla": MLAPlugin(_flashinfer_mla, _NARROW, ("forward_batch", "disable_flashinfer_ragged"), _every_call),
    "flashattention": MLAPlugin(_flashattention, {}, None, _nothing, decodes=False, prefills_always=True),
    "flashmla": MLAPlugin(_flashmla, {"dtype": DType.FLOAT32}, None, _nothing, prefills=False),
    "trtllm_mla": MLAPlugin(_trtllm_mla, {}, ("forward_batch",), _what_falls_back),
    "tokenspeed_mla": MLAPlugin(_tokenspeed_mla, _FP8, ("forward_batch",), _what_falls_back),
    "cutedsl_mla": MLAPlugin(_cutedsl_mla, {}, ("forward_batch",), _nothing, prefills=False),
    "triton_mla": MLAPlugin(_triton_mla, _NARROW, None, _nothing, as_mha=False, prefills_always=True),
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
    """A backend joined to one for linear layers, as in a hybrid model."""
    from attnplug_hybrid_linear.torch_backend import TorchLinearBackend

    states = LinearStatePool([_LINEAR], num_slots=2, dtype=DType.FLOAT32, device="cpu")
    model = ModelSpec("joined", "test", (_LINEAR, *context.model.layers), 1 << 20)
    own = replace(context, pools=KVPools(linear=states), model=model)
    return HybridLinearBackend(full, TorchLinearBackend(declaring(own, "torch")), model)
