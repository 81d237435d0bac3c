"""Small scenes for torch_native or another backend: small heads, float32, pages of 16 rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnplug import CacheLayout, DType, ForwardBatch, ForwardMode
from attnplug.host import MLADims
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_testing import kernel_scene
from attnplug_testing.kernel_scene import KernelCase, KernelScene, Lengths, Make


def small(
    lengths: Lengths,
    mode: ForwardMode = ForwardMode.EXTEND,
    page_size: int = 16,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 16,
    v_head_dim: int = 16,
    *,
    mla: MLADims | None = None,
    dtype: DType = DType.FLOAT32,
    layout: str = "token_major",
    **changes: Any,
) -> KernelCase:
    """Return a case with small heads in float32; of an MLA layer if ``mla`` is given."""
    changes["layout"] = CacheLayout(layout)
    if mla is not None:
        changes |= {"dims": mla, "v_head_dim": v_head_dim}
        return kernel_scene.mla(lengths, mode, page_size, heads, dtype=dtype, **changes)
    return kernel_scene.mha(lengths, mode, page_size, heads, kv_heads, head_dim, v_head_dim, dtype=dtype, **changes)


class Stage(KernelScene):
    """Scene of a backend, by default torch_native, that returns results on the host."""

    def __init__(self, case: KernelCase, device: str, build: Make = TorchNativeBackend) -> None:
        super().__init__(case, device, build)

    def results(self, batch: ForwardBatch | None = None, *, save: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp on the host, padding rows included."""
        out, lse = super().results(batch, save=save)
        return out.cpu(), None if lse is None else lse.cpu()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error relative to the largest wanted value (at least 1); NaN if any result is NaN."""
    return float((found.double() - wanted.to(found.device)).abs().max() / wanted.abs().max().clamp(min=1.0))
