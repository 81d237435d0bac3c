"""Validation of a model's attention call, and its layer as a ``LayerSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug import AttentionKind, LayerSpec
from attnplug_transformers.errors import BridgeError

_IGNORED = frozenset(
    {
        "cache_position",
        "deterministic",
        "is_causal",  # read below
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",  # the mask's window applies
        "use_cache",
    }
)
"""Arguments that attention does not depend on. Any other that is set is refused, because it may matter."""
_READ = frozenset({"softcap", "s_aux"})
_ADVICE = {
    "output_attentions": "no backend computes weights; use attn_implementation='eager' for them",
    "position_bias": "backends do not support a bias on logits",
    "cu_seq_lens_q": "packed sequences are not supported here; pad them, or use generate_batch",
}
ENCODER_ADVICE = (
    "A model's encoder can have another implementation: attn_implementation={'text_config': 'attnplug:…', "
    "'vision_config': 'sdpa'}"
)


@dataclass(frozen=True, slots=True)
class Call:
    """Spec of the calling layer, and its sink logits ``[heads]`` float32, if any."""

    layer: LayerSpec
    sinks: Tensor | None


def read_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    others: Mapping[str, object],
    expected: frozenset[str] = frozenset(),
) -> Call:
    """Validate a layer's call; see ``check_call``."""
    check_call(module, query, key, value, dropout, others, expected)
    sinks, softcap = sinks_of(others), others.get("softcap")
    assert softcap is None or isinstance(softcap, int | float)
    layer = layer_of(query, key, value, scaling, window, softcap, sinks is not None)
    return Call(layer, sinks)


def check_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    others: Mapping[str, object],
    expected: frozenset[str] = frozenset(),
) -> None:
    """Validate a layer's call. ``expected``: names of arguments that the caller handles itself.

    Raises :class:`BridgeError` for training, dropout, non-causal attention and unknown arguments.
    """
    name = type(module).__name__
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise BridgeError(
            f"{name} was called for training: backends have no backward pass; wrap inference in torch.no_grad(), or "
            "train with attn_implementation='sdpa'"
        )
    if dropout:
        raise BridgeError(f"{name} requests dropout {dropout}: backends support only inference; call model.eval()")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        text = f"{name} is not causal (encoder or cross attention); backends support only causal attention"
        raise BridgeError(f"{text}. {ENCODER_ADVICE}")
    for key_name, given in others.items():
        if key_name in _IGNORED | _READ | expected or given is None or given is False:
            continue
        advice = _ADVICE.get(key_name, "it may change what attention computes; use attn_implementation='sdpa'")
        raise BridgeError(f"{name} was called with {key_name}, which the bridge does not pass on: {advice}")
    if not query.dtype == key.dtype == value.dtype:
        raise BridgeError(
            f"{name} has q, k and v in {query.dtype}, {key.dtype} and {value.dtype}; backends need one dtype for all"
        )
    if others.get("s_aux") is None and isinstance(getattr(module, "sinks", None), Tensor):
        raise BridgeError(f"{name} has sinks but does not pass them as s_aux; it is not supported")


def autocast(tensor: Tensor) -> Tensor:
    """Convert queries, keys or values to the dtype of an enclosing ``torch.autocast``, if there is one."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def sinks_of(others: Mapping[str, object]) -> Tensor | None:
    """Sink logits ``[heads]`` float32 of a call, if any."""
    sinks = others.get("s_aux")
    assert sinks is None or isinstance(sinks, Tensor)
    return None if sinks is None else sinks.detach().float().contiguous()


def is_last_attention(module: torch.nn.Module) -> bool:
    """Return True for the last layer with attention. In hybrid models, layers of other types may follow."""
    config: Any = module.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    own = [i for i, kind in enumerate(kinds) if kind.endswith("attention") and kind != "linear_attention"]
    return own[-1:] == [module.layer_idx]


def layer_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> LayerSpec:
    """Spec of the calling layer."""
    return LayerSpec(
        layer_id=0,
        kind=AttentionKind.MHA,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        sliding_window=window,
        logit_cap=None if softcap is None else float(softcap),
        sinks=sinks,
    )
