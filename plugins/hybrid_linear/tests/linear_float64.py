"""Linear attention in float64 numpy, one token at a time, written from ``LinearInputs``' equations."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from attnplug.linear import LinearInputs

Array = NDArray[np.float64]


def recurrence(inputs: LinearInputs, state: Array, scale: float) -> tuple[Array, Array]:
    """The output ``[tokens, heads, value_dim]`` of one request, and its state ``[heads, key_dim, value_dim]`` after."""
    q, k, v, log_decay = (_array(tensor) for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    beta = None if inputs.beta is None else _array(inputs.beta)
    tokens, heads, _ = v.shape
    key_head = [head * q.shape[1] // heads for head in range(heads)]
    if inputs.normalize:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k, decay, out = q[:, key_head], k[:, key_head], np.exp(log_decay), np.zeros_like(v)
    for token in range(tokens):
        key = k[token, :, :, None]
        old = (decay if decay.ndim == 1 else decay[token]).reshape(heads, -1, 1) * state
        write = v[token] if beta is None else beta[token, :, None] * (v[token] - (key * old).sum(1))
        state = old + key * write[:, None]
        out[token] = scale * (q[token, :, :, None] * state).sum(1)
    return out, state


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, state: Array
) -> tuple[Array, Array]:
    """The output ``[tokens, channels]`` of one request, and its last rows ``[channels, width]`` after."""
    rows, taps = _array(x), _array(weight)
    out = np.zeros_like(rows)
    for token, row in enumerate(rows):
        state = np.concatenate([state[:, 1:], row[:, None]], 1)
        out[token] = (state * taps).sum(1) + (0 if bias is None else _array(bias))
    return (out / (1 + np.exp(-out)) if silu else out), state


def relative_error(found: torch.Tensor, wanted: Array) -> float:
    """The largest difference against the largest value; NaN if anything found is NaN, which fails every comparison."""
    difference = np.abs(_array(found) - wanted).max(initial=0)
    return float(difference / max(np.abs(wanted).max(initial=0), 1e-30)) if difference != 0 else 0.0


def _array(tensor: torch.Tensor) -> Array:
    return tensor.double().cpu().numpy()
