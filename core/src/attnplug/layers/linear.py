"""Linear attention as a model's layers see it: the two calls that the active backend runs."""

from __future__ import annotations

from torch import Tensor

from attnplug.contract.backend import LinearBackend, bind_optional_hook
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.hooks import Hook
from attnplug.contract.linear import LinearInputs
from attnplug.declare.errors import BackendError
from attnplug.declare.model import LayerSpec
from attnplug.declare.settings import Setting
from attnplug.layers.forward_context import active_linear


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
                f"choose a `{Setting.LINEAR_ATTENTION_BACKEND}`",
                settings=[Setting.LINEAR_ATTENTION_BACKEND],
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
