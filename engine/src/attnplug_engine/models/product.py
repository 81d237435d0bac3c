"""The product of activations and a weight, in the way that the libraries at hand are fastest at."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# On a CPU torch multiplies float32 by MKL. For the rows of a batch that decodes there are two faster ways, both with
# the weight as it lies. Each call of them costs more than a plain one, so they are for weights that are large enough:
# a product of MKL with the weight first, because its kernels are made for many rows, and for the largest oneDNN.
_WEIGHT_FIRST_ROWS, _WEIGHT_FIRST_PRODUCTS = range(8, 49), 1 << 23
_ONEDNN_ROWS, _ONEDNN_WEIGHT = range(8, 65), 1 << 22
_MKL = torch.backends.mkl.is_available()


def _onednn_is_there() -> bool:
    """Whether torch has the operator below, which is its compiler's own, in the form in which it is called."""
    if not (_MKL and torch.backends.mkldnn.is_available()):
        return False
    try:
        _by_onednn(torch.ones(1, 1), torch.ones(1, 1), None)
    except (AttributeError, RuntimeError):
        return False
    return True


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


_ONEDNN = _onednn_is_there()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` ``[…, in_features]`` by ``weight`` ``[out_features, in_features]``: ``[…, out_features]``, contiguous."""
    if x.is_cpu and x.dtype is torch.float32 and x.dim() == 2:
        rows, size = x.shape[0], weight.numel()
        if _ONEDNN and size >= _ONEDNN_WEIGHT and rows in _ONEDNN_ROWS:
            return _by_onednn(x, weight, bias)
        if _MKL and rows in _WEIGHT_FIRST_ROWS and rows * size >= _WEIGHT_FIRST_PRODUCTS:
            turned = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
            return turned.t().contiguous()
    return F.linear(x, weight, bias)
