"""One call of a model's attention layer, read and checked: what the layer is, as a ``LayerSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import AttentionKind, LayerSpec
from attnplug_transformers.errors import BridgeError

_MEANS_NOTHING = frozenset(
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
        "sliding_window",  # what the mask says is what counts
        "use_cache",
    }
)
"""What models pass on that no attention depends on. Anything else that is set is refused: it may matter."""
_READ = frozenset({"softcap", "s_aux"})
_ADVICE = {
    "output_attentions": "no backend computes weights; use attn_implementation='eager' for them",
    "position_bias": "a bias on logits is beyond what backends take",
    "cu_seq_lens_q": "packed sequences are not told apart by lengths here; pad them, or use generate_batch",
}


@dataclass(frozen=True, slots=True)
class Call:
    """What one layer is given besides q, k and v."""

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
    """Read a call of a layer. ``expected`` are names that the caller reads itself."""
    name = type(module).__name__
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise BridgeError(
            f"{name} was called for training: backends have no backward pass; wrap inference in torch.no_grad(), or "
            "train with attn_implementation='sdpa'"
        )
    if dropout:
        raise BridgeError(f"{name} asks for dropout {dropout}: backends run inference alone; call model.eval()")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise BridgeError(f"{name} is not causal (encoder or cross attention); backends serve causal attention only")
    for key_name, given in others.items():
        if key_name in _MEANS_NOTHING | _READ | expected or given is None or given is False:
            continue
        advice = _ADVICE.get(key_name, "it may change what attention computes; use attn_implementation='sdpa'")
        raise BridgeError(f"{name} was called with {key_name}, which the bridge does not pass on: {advice}")
    if not query.dtype == key.dtype == value.dtype:
        raise BridgeError(
            f"{name} has q, k and v in {query.dtype}, {key.dtype} and {value.dtype}; backends need one type for all"
        )
    sinks, softcap = others.get("s_aux"), others.get("softcap")
    if sinks is None and isinstance(getattr(module, "sinks", None), Tensor):
        raise BridgeError(f"{name} has sinks, and does not pass them on as s_aux; its attention cannot be served")
    assert sinks is None or isinstance(sinks, Tensor)
    assert softcap is None or isinstance(softcap, int | float)
    layer = LayerSpec(
        layer_id=0,
        kind=AttentionKind.MHA,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        sliding_window=window,
        logit_cap=None if softcap is None else float(softcap),
        sinks=sinks is not None,
    )
    return Call(layer, None if sinks is None else sinks.detach().float().contiguous())
