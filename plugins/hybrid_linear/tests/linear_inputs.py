"""Random inputs of every kind of linear layer, at every strength of decay."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import AttentionKind
from attnplug.linear import LinearDims, LinearInputs

RECURRENT = (AttentionKind.GDN, AttentionKind.KDA, AttentionKind.LIGHTNING, AttentionKind.MAMBA2)
DELTA = (AttentionKind.GDN, AttentionKind.KDA)


def random_inputs(
    kind: AttentionKind,
    dims: LinearDims,
    tokens: int,
    random: torch.Generator,
    *,
    decay: float = 1.0,
    normalize: bool = False,
    dtype: torch.dtype = torch.float32,
) -> LinearInputs:
    """``decay`` is the strongest log decay; some tokens, and with KDA some channels, hardly decay at all."""
    q, k = (torch.randn(tokens, dims.key_heads, dims.key_dim, generator=random) for _ in "qk")
    k /= k.norm(dim=-1, keepdim=True).clamp(min=1)  # longer keys make the delta rule itself diverge
    v = torch.randn(tokens, dims.heads, dims.value_dim, generator=random)
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    log_decay = -decay * _skewed(tokens, dims.heads, dims.key_dim, random=random)
    if kind is not AttentionKind.KDA:
        log_decay = log_decay[..., 0]
    if kind is AttentionKind.LIGHTNING:
        log_decay = -decay * _skewed(dims.heads, random=random)
    beta = 2 * torch.rand(tokens, dims.heads, generator=random) if kind in DELTA else None
    return LinearInputs(q, k, v, log_decay, beta, normalize)


def _skewed(*shape: int, random: torch.Generator) -> Tensor:
    """Values from 0 to 1 of all orders of magnitude, including both ends."""
    uniform = torch.rand(*shape, generator=random)
    return torch.where(torch.rand(*shape, generator=random) < 0.1, uniform.round(), uniform**8)


def tokens_of(inputs: LinearInputs, tokens: slice) -> LinearInputs:
    """The same layer's inputs for some of the tokens."""
    decay, beta = inputs.log_decay, inputs.beta
    return LinearInputs(
        inputs.q[tokens],
        inputs.k[tokens],
        inputs.v[tokens],
        decay if decay.dim() == 1 else decay[tokens],
        None if beta is None else beta[tokens],
        inputs.normalize,
    )
