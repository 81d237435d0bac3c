"""Stand-ins for the few vLLM names that the bridge's classes import, so that they run without vLLM.

They implement only what the bridge relies on. test_signatures.py checks the names against vLLM's own sources, and
``make bridge-test`` runs the classes in vLLM itself, on the CPU. Behaviour that vLLM shows only on a GPU is tested with
these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch

import attnplug_vllm
from attnplug_vllm import selection

OURS = ("mha", "mla", "sparse_mla", "indexer")
_CONTENT = {"nvfp4": lambda dim: 2 * (dim // 2 + dim // 16), "fp8_per_token_head": lambda dim: 2 * (dim + 4)}
Metadata = TypeVar("Metadata")


class Support(Enum):
    """``AttentionCGSupport``"""

    NEVER = auto()
    UNIFORM_SINGLE_TOKEN_DECODE = auto()
    UNIFORM_BATCH = auto()
    ALWAYS = auto()


class QueryLens(Enum):
    """``QueryLenSupport``"""

    SINGLE_ONLY = auto()
    UNIFORM = auto()
    VARLEN = auto()


@dataclass(frozen=True)
class MultipleOf:
    base: int


class Plain:
    """A base class without behaviour."""


class Builder:
    """``AttentionMetadataBuilder``"""

    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
        )

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool = False) -> None:
        self.reorder_batch_threshold = threshold


class MLAImpl(Generic[Metadata]):
    """``MLACommonImpl``"""

    need_to_return_lse_for_decode = False

    def __init__(self, *given: Any, **mla_args: Any) -> None:
        self.kv_cache_dtype = given[6]

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return True


class MLABuilder(Builder, Generic[Metadata]):
    """``MLACommonMetadataBuilder``: all requests decode."""

    _prefill_backend: Any = "vLLM's"

    def build(self, common_prefix_len: int, given: Any, fast_build: bool = False) -> Any:
        decode = self._build_decode(  # type: ignore[attr-defined] # of the subclass, as in vLLM
            block_table_tensor=given.block_table_tensor,
            seq_lens_device=given.seq_lens,
            max_seq_len=given.max_seq_len,
            query_start_loc_cpu=given.query_start_loc_cpu,
            query_start_loc_device=given.query_start_loc,
            num_decode_tokens=given.num_actual_tokens,
            dcp_tot_seq_lens_device=None,
        )
        return SimpleNamespace(decode=decode)

    def build_for_cudagraph_capture(self, given: Any) -> Any:
        return self.build(0, given)


class SparseMLAImpl:
    """``SparseMLACommonImpl``"""

    def __init__(self, *given: Any, indexer: Any = None, topk_indices_buffer: Any = None, **mla_args: Any) -> None:
        self.kv_cache_dtype = given[6]
        self.topk_indices_buffer = topk_indices_buffer if indexer is None else indexer.topk_indices_buffer

    def do_kv_cache_update(
        self, kv_c_normed: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any
    ) -> None:
        pages = kv_cache.flatten(0, 1)
        live = slot_mapping >= 0
        pages[slot_mapping[live]] = torch.cat([kv_c_normed, k_pe.squeeze(1)], -1)[live]


class Op(torch.nn.Module):
    """``CustomOp``"""

    replaced: ClassVar[dict[str, type]] = {}

    def __new__(cls, *given: Any, **named: Any) -> Any:
        return super().__new__(cls.replaced.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, other: type, name: str) -> type:
        assert name not in cls.replaced
        cls.replaced[name] = other
        return other

    def forward(self, *given: Any) -> Any:
        return self.forward_cuda(*given)  # type: ignore[operator] # of the subclass, as in vLLM


class SparseAttnIndexer(Op):
    """Layer of the same name."""

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Any,
        skip_k_cache_insert: bool = False,
    ) -> None:
        raise RuntimeError("Sparse Attention Indexer CUDA op requires DeepGEMM")

    def forward_cuda(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        return "vLLM's"


class SparseMLABuilder(Builder):
    """``SparseMLACommonMetadataBuilder``: requests with more new tokens than the threshold prefill."""

    metadata_cls: Any

    def build(self, common_prefix_len: int, given: Any, fast_build: bool = False) -> Any:
        self._build_req_id_per_token(given)  # type: ignore[attr-defined] # of the subclass, as in vLLM
        lens = given.query_start_loc_cpu.diff()
        decodes = next((at for at, new in enumerate(lens) if new > self.reorder_batch_threshold), len(lens))
        return self.metadata_cls(
            num_decodes=decodes,
            num_prefills=len(lens) - decodes,
            num_decode_tokens=int(given.query_start_loc_cpu[decodes]),
            num_actual_tokens=given.num_actual_tokens,
        )

    def build_for_drafting(self, given: Any, draft_index: int) -> Any:
        return self.build(0, given, fast_build=True)


@dataclass
class Spec:
    """``FullAttentionSpec`` of vLLM 0.26, whose pages the quantization mode determines."""

    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: Any
    kv_quant_mode: str

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * _CONTENT[self.kv_quant_mode](self.head_size)


class MLAPrefill:
    """``MLAPrefillBackend``"""

    def __init__(self, **given: Any) -> None:
        self.given = given


class Host:
    """State that tests set: current configuration, platform, layout of caches."""

    config: Any = None
    device = "cpu"
    layout = "NHD"


@dataclass
class Place:
    """A member of ``AttentionBackendEnum``. A place without a backend has an empty value."""

    value: str = ""
    path: str | None = None

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str:
        return self.path or self.value


PLACES = {"CUSTOM": Place(), "CPU_ATTN": Place("vllm.CPU")}
PLATFORM = SimpleNamespace(
    is_cpu=lambda: Host.device == "cpu",
    is_cuda=lambda: Host.device == "cuda",
    get_device_capability=lambda: SimpleNamespace(major=9, minor=0),
    device_name="other",
)
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.config": {
        "get_current_vllm_config": lambda: Host.config,
        "get_current_vllm_config_or_none": lambda: Host.config,
    },
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.v1.attention.backend": {
        "AttentionBackend": Plain,
        "AttentionCGSupport": Support,
        "AttentionImpl": Plain,
        "AttentionMetadataBuilder": Builder,
        "AttentionType": SimpleNamespace(DECODER="decoder"),
        "MultipleOf": MultipleOf,
    },
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": Spec, "get_kv_quant_mode": str},
    "vllm.utils.import_utils": {"resolve_obj_by_qualname": str},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": SimpleNamespace(__members__=PLACES),
        "register_backend": lambda place, path: setattr(place, "path", path),
    },
    "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: Host.layout},
    "vllm.v1.attention.backends.mla.prefill.base": {"MLAPrefillBackend": MLAPrefill},
    "vllm.v1.attention.backends.mla.indexer": {"DeepseekV32IndexerBackend": Plain},
    "vllm.model_executor.custom_op": {"CustomOp": Op, "op_registry_oot": Op.replaced},
    "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": Plain},
    "vllm.model_executor.layers.sparse_attn_indexer": {"SparseAttnIndexer": SparseAttnIndexer},
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonBackend": Plain,
        "MLACommonImpl": MLAImpl,
        "MLACommonMetadata": Plain,
        "MLACommonMetadataBuilder": MLABuilder,
        "QueryLenSupport": QueryLens,
    },
    "vllm.model_executor.layers.attention.sparse_mla_attention": {
        "SparseMLACommonImpl": SparseMLAImpl,
        "SparseMLACommonMetadataBuilder": SparseMLABuilder,
    },
}


@contextmanager
def vllm() -> Iterator[SimpleNamespace]:
    """Import our classes over the stand-ins, and restore everything afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name, members in MODULES.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                if path not in sys.modules:
                    patch.setitem(sys.modules, path, ModuleType(path))
            vars(sys.modules[name]).update(members)
        selection.forget()
        try:
            yield SimpleNamespace(**{name: import_module(f"attnplug_vllm.{name}") for name in OURS})
        finally:
            selection.forget()
            for name in OURS:
                sys.modules.pop(f"attnplug_vllm.{name}", None)
                vars(attnplug_vllm).pop(name, None)
