"""MLA in vLLM: the backend class that it asks for capabilities, and the implementation that its layers call.

vLLM absorbs, chunks and merges MLA itself. Its decode calls arrive at :meth:`AttnplugMLAImpl.forward_mqa`, with absorbed
queries; ``mla_steps`` makes their metadata. Its prefill runs on a backend of vLLM's, or on one of ours that is named for
it (``mla_prefill``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl, MLACommonMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf

from attnplug import LayerSpec, Refusal, RefusalCode, Role, Setting
from attnplug.host import Selection
from attnplug_vllm.choice import choose, insist, page_sizes
from attnplug_vllm.config import OPTION
from attnplug_vllm.host import BLOCK_STEP
from attnplug_vllm.mla_steps import AttnplugMLABuilder, DecodeStep
from attnplug_vllm.specs import mla_layer, model_of

logger = init_logger(f"vllm.{__name__}")


class AttnplugMLABackend(MLACommonBackend):
    """What vLLM asks of a class. Whether a backend of ours serves is judged when the first layer is made, with every
    reason, and before weights are loaded."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttnplugMLAImpl]:
        return AttnplugCPUMLAImpl if current_platform.is_cpu() else AttnplugMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttnplugMLABuilder]:
        return AttnplugMLABuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        kernel = page_sizes().kernel
        return [MultipleOf(max(size, BLOCK_STEP)) for size in sorted(kernel)] if kernel else [MultipleOf(BLOCK_STEP)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """64 where it serves: kernels then look up one page for many rows."""
        wanted = max(default_block_size, 64)
        return wanted if cls.supports_block_size(wanted) else super().get_preferred_block_size(default_block_size)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return True  # what is not served is refused by its name


class AttnplugMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """One layer. ``spec`` and ``selection`` are what the builder of its KV group builds a backend from."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,  # vLLM's own, which grow with its versions
    ) -> None:
        config = get_current_vllm_config()
        insist(_unsupported(config, alibi_slopes, sliding_window, logits_soft_cap, mla_args.get("indexer")))
        self.spec = mla_layer(
            0,
            heads=num_heads,
            scale=scale,
            kv_lora_rank=mla_args["kv_lora_rank"],
            nope=mla_args["qk_nope_head_dim"],
            rope=mla_args["qk_rope_head_dim"],
            v_head_dim=mla_args["v_head_dim"],
        )
        self.selection = _choose(config, self.spec, kv_cache_dtype)
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.supports_quant_query_input = False  # queries stay in the model's type, whatever the cache holds

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return Role.PREFILL not in self.selection.choices and bool(super().fused_output_quant_supported(quant_key))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with absorbed queries, given as latent and rotary part. The rows are in the cache already."""
        step = attn_metadata.decode
        assert isinstance(step, DecodeStep)
        latent, rope = q if isinstance(q, tuple) else (q, None)
        lse = None
        if self.need_to_return_lse_for_decode:
            lse = torch.empty(latent.shape[:2], dtype=torch.float32, device=latent.device)
        return step.attend(latent, rope, layer.layer_name, lse), lse


class AttnplugCPUMLAImpl(AttnplugMLAImpl):
    """On the CPU, where vLLM has no kernel that writes latent rows."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten().long()
        live = (slots >= 0).nonzero().squeeze(1)
        slots, size = slots[live], kv_cache.shape[1]
        rows = torch.cat([kv_c_normed[live], k_pe.squeeze(1)[live]], -1)
        kv_cache[slots // size, slots % size] = rows.to(kv_cache.dtype)


def _choose(config: Any, spec: LayerSpec, kv_cache_dtype: str) -> Selection:
    """The selection of an equal layer that was made before, or a new one."""
    for layer in reversed(config.compilation_config.static_forward_context.values()):
        other = getattr(layer, "impl", None)
        if isinstance(other, AttnplugMLAImpl) and (other.spec, other.kv_cache_dtype) == (spec, kv_cache_dtype):
            return other.selection
    selection = choose(config, model_of(config, [spec]), kv_cache_dtype)
    decode = selection.chosen(Role.DECODE).spec.name
    if Role.PREFILL in selection.choices:
        logger.info_once("attnplug: %s decodes, %s prefills", decode, selection.chosen(Role.PREFILL).spec.name)
    else:
        told = "attnplug: %s decodes, vLLM's own MLA prefill backend prefills; %s.prefill names another one"
        logger.info_once(told, decode, OPTION)
    return selection


def _unsupported(config: Any, alibi: Any, window: Any, cap: Any, indexer: Any) -> list[Refusal]:
    found = {
        "ALiBi slopes": alibi is not None,
        "a sliding window over latent rows": window is not None,
        "a soft cap of latent attention's logits": bool(cap),
        "sparse MLA (an indexer, as in DeepSeek-V3.2)": indexer is not None,
    }
    refusals = [
        Refusal(RefusalCode.FEATURE, f"{name}: attnplug's bridge does not carry it") for name, there in found.items() if there
    ]
    theirs = config.attention_config.mla_prefill_backend
    if theirs is not None and "prefill" in ((config.additional_config or {}).get("attnplug") or {}):
        message = f"--attention-config.mla_prefill_backend {theirs.name} names another backend to prefill; leave one out"
        refusals.append(Refusal(RefusalCode.ROLE, message, theirs.name, setting=Setting.PREFILL_ATTENTION_BACKEND))
    return refusals
