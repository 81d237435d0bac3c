"""Matrix product of activations and a weight, by the fastest library available."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug_engine.kernels.invariant import active

# On a CPU torch multiplies float32 with MKL. For the rows of a decoding batch two ways are faster, both with the weight
# unchanged: MKL with the weight as the first factor, because its kernels are made for many rows, and oneDNN for a large
# weight. Both have a higher call overhead: tiny weights use the plain call, and so do small ones with few rows.
_FEWEST, _FEWEST_SMALL = 8, 16
_MAX_ONEDNN, _MAX_WEIGHT_FIRST = 64, 48
_TINY, _SMALL, _LARGE = 1 << 18, 1 << 19, 1 << 22
_MKL = torch.backends.mkl.is_available()
# Without MKL, e.g. on Arm, torch uses OpenBLAS, which packs a weight anew for every product. Packed for oneDNN once, a
# product with two rows or more is 1.1 to 4.8 times as fast; with a single row it is not.
_FEWEST_PACKED, _PACKED_FOR = 2, 8


def _onednn() -> Callable[..., Tensor] | None:
    """Return torch's internal oneDNN operator; None if it does not exist with the expected signature."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        # Resolved to the overload once: the lookup takes microseconds.
        linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        linear(torch.ones(1, 1), torch.ones(1, 1) if _MKL else _laid_out(torch.ones(1, 1)), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return linear


def _laid_out(weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
    return result


_ONEDNN = _onednn()


def pack(weight: Tensor) -> Tensor | None:
    """Return a packed copy of a weight with which :func:`matmul` is faster on this machine; None if there is none."""
    packs = _ONEDNN is not None and not _MKL and weight.is_cpu and weight.dtype is torch.float32
    return _laid_out(weight) if packs and weight.numel() >= _TINY else None


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """Multiply ``x [..., in_features]`` by ``weight [out_features, in_features]``: ``[..., out_features]``, contiguous.

    ``packed`` is the result of :func:`pack` for the weight. Batch-invariant arithmetic has its own product.
    """
    rows = x.shape[0]
    if packed is not None and rows >= _FEWEST_PACKED and x.dim() == 2 and _ONEDNN is not None and not active():
        return _ONEDNN(x, packed, bias, "none", [], "")
    size = weight.numel()
    fewest = _FEWEST if size > _SMALL else _FEWEST_SMALL
    if size >= _TINY and rows >= fewest and x.dim() == 2 and x.is_cpu and x.dtype is torch.float32 and not active():
        if size >= _LARGE and _MKL and _ONEDNN is not None and rows <= _MAX_ONEDNN:
            return _ONEDNN(x, weight, bias, "none", [], "")
        if _MKL and rows <= _MAX_WEIGHT_FIRST:
            turned = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
            return turned.t().contiguous()
    return F.linear(x, weight, bias)
