"""KV cache formats by vLLM's ``--kv-cache-dtype``, and their rows in vLLM's pages.

vLLM accepts a closed list of names. A format of a plugin with one of these names is stored in pages whose size the
format determines: from 0.29 on a backend sets the bytes of a row (``customize_spec``); before, vLLM computes them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from attnplug import DType, KVFormat, LayerSpec, Refusal, RefusalCode, Setting, UsageError
from attnplug.host import Registry, load_registry
from attnplug_vllm.host import FP8_DS_MLA, PLUGIN_FORMATS

_FP8 = ("fp8", "fp8_e4m3")
_UNQUANTIZED = ("auto", "float16", "bfloat16", "float32")


@cache
def registry() -> Registry:
    """Installed backends and KV formats, loaded once per process."""
    return load_registry()


def attnplug_dtype(dtype: torch.dtype) -> DType:
    """Convert the dtype of activations."""
    return DType.parse(str(dtype), Setting.DTYPE)


def cache_format(name: str, dtype: torch.dtype) -> KVFormat:
    """Return the format of a cache by vLLM's ``kv_cache_dtype``; ``dtype`` is that of activations.

    Raises :class:`UsageError` if no installed package provides it.
    """
    if name == "auto":
        return registry().kv_format(attnplug_dtype(dtype))
    provided = (*plugin_formats(), *([FP8_DS_MLA] if FP8_DS_MLA in registry().kv_formats else []))
    if name in (*_FP8, *_UNQUANTIZED, *provided):
        return registry().kv_format(name)
    allowed = ", ".join((*_UNQUANTIZED, *_FP8, *provided))
    raise UsageError(
        f"`{Setting.KV_DTYPE}` {name} is not supported by attnplug's bridge, only {allowed}",
        settings=[Setting.KV_DTYPE],
    )


def plugin_formats() -> tuple[str, ...]:
    """Names of vLLM's that installed packages provide as formats."""
    return tuple(name for name in PLUGIN_FORMATS if name in registry().kv_formats)


def row_elements(kv_cache_dtype: str, head_size: int, v_head_size: int | None = None) -> int:
    """Elements of one head's key and value in vLLM's cache: bytes if a plugin provides the format."""
    sizes = head_size, head_size if v_head_size is None else v_head_size
    if kv_cache_dtype not in plugin_formats():
        return sum(sizes)
    format = registry().kv_format(kv_cache_dtype)
    return sum(map(format.row_nbytes, sizes))


def wrong_page_size(kv_cache_dtype: str, layer: LayerSpec) -> list[Refusal]:
    """Refusal of a format whose rows differ in size from those that vLLM allocates; for vLLM up to 0.28."""
    if kv_cache_dtype not in plugin_formats():
        return []
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    if hasattr(AttentionBackend, "customize_spec"):
        return []
    theirs: Any = FullAttentionSpec(
        block_size=1,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_dim,
        head_size_v=layer.v_head_dim,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
    )
    allocated, needed = theirs.page_size_bytes, registry().kv_format(kv_cache_dtype).token_nbytes(layer)
    if allocated == needed:
        return []
    text = f"this vLLM allocates {allocated} bytes per token for {kv_cache_dtype}; the installed format takes {needed}"
    return [Refusal(RefusalCode.KV_DTYPE, text, kv_cache_dtype, setting=Setting.KV_DTYPE)]
