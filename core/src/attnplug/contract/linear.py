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
    q and k are first brought to length one (divided by the root of their squares' sum plus 1e-6).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    normalize: bool = False
