"""Inputs of linear-attention layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LinearInputs:
    """Inputs of a layer's recurrence, one row per new token.

    A request's state S ``[heads, key_dim, value_dim]`` is updated token by token. For each token and head, with
    ``d = exp(log_decay)``::

        S = d S                                     d scales all of S, or each of its key channels (KDA)
        S = S + k (v - k S) beta     with ``beta``: the delta rule (GDN, KDA)
        S = S + k v                  without        (Lightning, Mamba2)
        out = scale q S              scale is the layer's

    q and k are ``[tokens, key_heads, key_dim]``, v is ``[tokens, heads, value_dim]``; head h uses key head
    ``h * key_heads // heads``. ``log_decay``, float32 and never above 0, is ``[tokens, heads]``, or ``[tokens, heads,
    key_dim]``, or ``[heads]`` if it is equal for all tokens. ``beta`` is ``[tokens, heads]``. With ``normalize``,
    q and k are L2-normalised first (divided by the root of their sum of squares plus 1e-6). Rows may have any stride.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    normalize: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """Weights of a delta-rule layer between its input and output projections.

    ``conv`` ``[conv_channels, conv_width]``; ``rate``, negative, ``[heads]`` or ``[heads, 1]``; ``bias`` ``[heads]`` or
    ``[heads, key_dim]``; ``norm`` ``[value_dim]``. All but ``conv`` are float32. The activation of
    the output gate is SiLU if ``silu``, else sigmoid.
    """

    conv: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """Inputs of a whole delta-rule layer: the outputs of its input projections.

    ``rows`` ``[tokens, conv_channels]`` are q, k and v concatenated, before the convolution. ``decay`` ``[tokens,
    heads]`` or ``[tokens, heads, key_dim]``, ``beta`` ``[tokens, heads]`` and ``gate`` ``[tokens, heads, value_dim]``
    are raw projections too. With the layer's weights, in float32, the input of the output projection is::

        q, k, v = silu(convolution(rows))                  rounded to the dtype of the rows
        log_decay = rate * softplus(decay + bias)
        beta = sigmoid(beta)                               rounded to the dtype of the rows
        out = recurrence(q, k, v, log_decay, beta)         as ``LinearInputs`` with ``normalize``; rounded too
        out = rms_norm(out, eps) * norm * activation(gate)
    """

    rows: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor
    weights: DeltaWeights
