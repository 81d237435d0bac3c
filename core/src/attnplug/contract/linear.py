"""What a layer of linear attention brings to its backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LinearInputs:
    """What a layer brings to its recurrence, one row per new token.

    A request's state S ``[heads, key_dim, value_dim]`` is updated token by token. For each token and head, with
    ``d = exp(log_decay)``::

        S = d S                                     d scales all of S, or each of its key channels (KDA)
        S = S + k (v - k S) beta     with ``beta``: the delta rule (GDN, KDA)
        S = S + k v                  without        (Lightning, Mamba2)
        out = scale q S              scale is the layer's

    q and k are ``[tokens, key_heads, key_dim]``, v is ``[tokens, heads, value_dim]``; head h goes with key head
    ``h * key_heads // heads``. ``log_decay``, float32 and never above 0, is ``[tokens, heads]``, or ``[tokens, heads,
    key_dim]``, or ``[heads]`` where it is the same for every token. ``beta`` is ``[tokens, heads]``. With ``normalize``
    q and k are first brought to length one (divided by the root of their squares' sum plus 1e-6). q, k and v may have
    any stride between rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    normalize: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """What a whole layer of the delta rule has between its projections.

    ``conv`` ``[conv_channels, conv_width]``; ``rate``, negative, ``[heads]`` or ``[heads, 1]``; ``bias`` ``[heads]`` or
    ``[heads, key_dim]``; ``norm`` ``[value_dim]``. All but ``conv`` are float32. The output's gate goes through SiLU if
    ``silu``, and through a sigmoid otherwise.
    """

    conv: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """A whole layer of the delta rule, from the rows of its input projections to those of its output projection.

    ``rows`` ``[tokens, conv_channels]`` are q, k and v one after the other, before their convolution. ``decay``
    ``[tokens, heads]`` or ``[tokens, heads, key_dim]``, ``beta`` ``[tokens, heads]`` and ``gate`` ``[tokens, heads,
    value_dim]`` are as projected too. With the layer's weights, in float32::

        q, k, v = silu(convolution(rows))                  rounded to the type of the rows
        log_decay = rate * softplus(decay + bias)
        beta = sigmoid(beta)                               rounded to the type of the rows
        out = recurrence(q, k, v, log_decay, beta)         as ``LinearInputs`` with ``normalize``; rounded too
        out = rms_norm(out, eps) * norm * activation(gate)
    """

    rows: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor
    weights: DeltaWeights
