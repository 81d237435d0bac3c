"""The mask function of our names: it makes no mask, it says which rows each request has.

transformers calls it once per forward pass and kind of layer (full, sliding), and gives its result to every layer of
that kind. So the result is also where a step's plan is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function, sliding_window_overlay

from attnplug_transformers.errors import BridgeError
from attnplug_transformers.steps import Step

MaskFunction = Callable[..., Any]


def step_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | Step | None = None,
    **others: object,
) -> Step:
    """The step of one kind of layer. Column j of the keys is the position ``kv_offset + j``, and query i is
    ``q_offset + i``. ``attention_mask`` ``[batch, positions]`` is false for padding."""
    window = mask_window(mask_function)
    if isinstance(attention_mask, Step):  # made by ``generate`` before the model asks, for caches of a fixed size
        made = attention_mask
        if (made.batch, made.queries, made.columns, made.window) != (batch_size, q_length, kv_length, window):
            raise BridgeError(
                f"the mask was prepared for a window of {made.window} and {made.columns} columns, and a layer needs "
                f"{window} and {kv_length}; models that reuse one mask for several kinds of layers are not supported"
            )
        return made
    start = q_offset - kv_offset  # a static cache counts in place: this is a tensor of its own
    if isinstance(start, Tensor) and start.device.type == "cpu":
        start = int(start)
    valid = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size:
            raise BridgeError(
                f"attention_mask has shape {list(attention_mask.shape)}; a backend takes lengths and no mask, so give "
                f"[{batch_size}, tokens] with 0 for padding"
            )
        valid = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if valid.shape[1] < kv_length:
            valid = torch.nn.functional.pad(valid, (0, kv_length - valid.shape[1]))
    return Step(batch_size, q_length, kv_length, start, window, valid)


def mask_window(mask_function: MaskFunction) -> int | None:
    """The window of a causal mask, ``None`` for one without. Any other mask is refused: a backend cannot honour it.

    Masks are functions. A sliding window is the conjunction of two, and its size is in the closure of one of them.
    """
    if mask_function is causal_mask_function:
        return None
    parts = _closure(mask_function).get("mask_functions")
    if _same(mask_function, _SLIDING) and isinstance(parts, tuple) and len(parts) == 2:
        window = _closure(parts[0]).get("sliding_window")
        if _same(parts[0], _WINDOW) and parts[1] is causal_mask_function and isinstance(window, int):
            return window
    raise BridgeError(
        f"this mask is neither causal nor a causal sliding window, but {_described(mask_function)}; backends derive "
        "what a token sees from lengths. Packed sequences, chunked, blockwise, prefix and bidirectional attention need "
        "an attn_implementation of transformers, such as 'sdpa'"
    )


def _closure(function: MaskFunction) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = function.__closure__ or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _same(function: MaskFunction, other: MaskFunction) -> bool:
    """Whether two closures are of one function."""
    return getattr(function, "__code__", None) is other.__code__


def _described(function: MaskFunction) -> str:
    """The names of the functions that a mask is made of."""
    inner = _closure(function).get("mask_functions")
    if isinstance(inner, tuple):
        return " and ".join(_described(part) for part in inner)
    return getattr(function, "__qualname__", repr(function)).partition(".")[0]


_SLIDING = sliding_window_causal_mask_function(1)
_WINDOW = sliding_window_overlay(1)
