"""Linear attention as a model's layers see it: what they bring, and the two calls that the active backend runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnplug.backend import LinearBackend, bind_optional_hook
from attnplug.batch import ForwardBatch
from attnplug.context import active_linear
from attnplug.errors import BackendError
from attnplug.hooks import Hook
from attnplug.model import LayerSpec


@dataclass(frozen=True, slots=True, eq=False)
class LinearInputs:
    """What a layer brings to its recurrence, one row per new token.

    A request's state S ``[heads, key_dim, value_dim]`` goes through its tokens in turn. For each of them, head by
    head, with ``d = exp(log_decay)``::

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


class LinearAttention:
    """The linear layers of one model on one backend: binds the backend's hooks once."""

    def __init__(self, backend: LinearBackend) -> None:
        self.convolve: Hook = self._bound(backend, "forward_conv")
        self.attend: Hook = self._bound(backend, "forward_linear")

    @staticmethod
    def _bound(backend: LinearBackend, name: str) -> Hook:
        hook = bind_optional_hook(backend, name)
        if hook is None:
            raise BackendError(
                f"the model has linear-attention layers, but backend {backend.backend_id.name} has no {name}; "
                "choose a --linear-attention-backend"
            )
        return hook


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, *, silu: bool = True
) -> Tensor:
    """The short convolution of a linear layer on the active backend; see ``LinearHooks.forward_conv``."""
    linear: LinearAttention = active_linear()
    out: Tensor = linear.convolve(x, weight, bias, layer, batch, silu)
    return out


def attend_linear(inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
    """The recurrence of a linear layer on the active backend: ``[tokens, heads, value_dim]``; writes its state."""
    linear: LinearAttention = active_linear()
    out: Tensor = linear.attend(inputs, layer, batch)
    return out
