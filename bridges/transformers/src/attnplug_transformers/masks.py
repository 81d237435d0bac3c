"""Mask function of ``attnplug:NAME``. It returns a ``PaddedStep`` instead of a mask, with each request's rows.

transformers calls it once per forward pass and layer type (full, sliding) and passes the result to every layer of that
type. The step therefore also keeps the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function, sliding_window_overlay

from attnplug_transformers.errors import BridgeError
from attnplug_transformers.layer_call import ENCODER_ADVICE
from attnplug_transformers.step import PaddedStep

MaskFunction = Callable[..., Any]


def step_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | PaddedStep | None = None,
    device: torch.device | None = None,
    **others: object,
) -> PaddedStep:
    """Step of one layer type. Column j of the keys has position ``kv_offset + j``, query i has ``q_offset + i``.

    ``attention_mask`` ``[batch, positions]`` is false for padding. Raises :class:`BridgeError` for other masks.
    """
    window = mask_window(mask_function)
    if isinstance(attention_mask, PaddedStep):  # ``generate`` makes it in advance for static caches
        made = attention_mask
        if (made.batch, made.queries, made.columns, made.window) != (batch_size, q_length, kv_length, window):
            raise BridgeError(
                f"the mask was prepared for a window of {made.window} and {made.columns} columns, but a layer needs "
                f"{window} and {kv_length}; models that reuse one mask for several layer types are not supported"
            )
        return made
    start = q_offset - kv_offset  # a new tensor: a static cache updates its counter in place
    position = None
    if q_length == 1:
        position = start if isinstance(start, Tensor) else torch.full((), start, device=device)
    if isinstance(start, Tensor) and start.device.type == "cpu" and not torch.compiler.is_compiling():
        start = int(start)
    valid = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
            raise BridgeError(
                f"attention_mask has shape {list(attention_mask.shape)}; backends take lengths and no mask, so pass "
                f"[{batch_size}, tokens] with 0 for padding"
            )
        if isinstance(start, int) and (width := attention_mask.shape[1]) < (tokens := kv_offset + start + q_length):
            raise BridgeError(
                f"attention_mask has {width} tokens, but {tokens - q_length} are in the cache and {q_length} are new; "
                "pass a mask of all of them. With use_cache=False, generate passes cached tokens again: pass "
                "use_cache=True, or leave past_key_values out"
            )
        valid = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if valid.shape[1] < kv_length:
            valid = torch.nn.functional.pad(valid, (0, kv_length - valid.shape[1]))
    return PaddedStep(batch_size, q_length, kv_length, start, window, valid, position)


def mask_window(mask_function: MaskFunction) -> int | None:
    """Window of a causal mask; ``None`` if it has none. Raises :class:`BridgeError` for any other mask.

    Masks are functions. A sliding window is the conjunction of two, and the closure of one of them has its size.
    """
    if mask_function is causal_mask_function:
        return None
    parts = _closure(mask_function).get("mask_functions")
    if _same_code(mask_function, _SLIDING) and isinstance(parts, tuple) and len(parts) == 2:
        window = _closure(parts[0]).get("sliding_window")
        if _same_code(parts[0], _WINDOW) and parts[1] is causal_mask_function and isinstance(window, int):
            return window
    raise BridgeError(
        f"this mask is neither causal nor a causal sliding window, but {_describe(mask_function)}; backends derive the "
        "visible tokens from lengths. Packed sequences, chunked, blockwise, prefix and bidirectional attention need an "
        f"attn_implementation of transformers, such as 'sdpa'. {ENCODER_ADVICE}"
    )


def _closure(function: MaskFunction) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = function.__closure__ or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _same_code(function: MaskFunction, other: MaskFunction) -> bool:
    """Return True if two closures come from one function."""
    return getattr(function, "__code__", None) is other.__code__


def _describe(function: MaskFunction) -> str:
    """Names of the functions that a mask consists of."""
    inner = _closure(function).get("mask_functions")
    if isinstance(inner, tuple):
        return " and ".join(_describe(part) for part in inner)
    return getattr(function, "__qualname__", repr(function)).partition(".")[0]


_SLIDING = sliding_window_causal_mask_function(1)
_WINDOW = sliding_window_overlay(1)
