"""Small layers of each kind, and pools for them."""

from __future__ import annotations

import torch

from attnplug import AttentionKind, DType, LayerSpec, MHAPool, MLAPool
from attnplug.host import MLADims
from attnplug.kv.layout import LayoutName
from attnplug.linear import LinearDims

LAYOUTS: list[LayoutName] = ["token_major", "head_major"]
ELEMENTS = list(DType)
PLAIN = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]


def mha_layer(layer_id: int = 0, *, kv_heads: int = 2, head_dim: int = 8, v_head_dim: int = 6) -> LayerSpec:
    return LayerSpec(layer_id, AttentionKind.MHA, 4 * kv_heads, kv_heads, head_dim, v_head_dim, 1.0)


def mla_layer(layer_id: int = 0) -> LayerSpec:
    return LayerSpec(layer_id, AttentionKind.MLA, 4, 4, 12, 8, 1.0, mla=MLADims(16, 8, 4))


def linear_layer(layer_id: int = 0, *, heads: int = 2, conv_width: int = 3) -> LayerSpec:
    dims = LinearDims(heads=heads, key_heads=1, key_dim=4, value_dim=5, conv_channels=6, conv_width=conv_width)
    return LayerSpec(layer_id, AttentionKind.GDN, 2, 2, 4, 5, 1.0, linear=dims)


def mha_pool(
    *layers: LayerSpec,
    dtype: DType = DType.FLOAT32,
    device: str = "cpu",
    layout: LayoutName = "token_major",
    scales: dict[int, tuple[float, float]] | None = None,
) -> MHAPool:
    return MHAPool(
        layers or [mha_layer()], num_pages=5, page_size=4, dtype=dtype, device=device, layout=layout, scales=scales
    )


def mla_pool(dtype: DType = DType.FLOAT32, device: str = "cpu", scales: dict[int, float] | None = None) -> MLAPool:
    return MLAPool([mla_layer()], num_pages=5, page_size=4, dtype=dtype, device=device, scales=scales)


def random_rows(tokens: int, heads: int, dim: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(device)
