"""The attention function of our names."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import ForwardExtras
from attnplug.host import BackendRequest, Limits
from attnplug_transformers.calls import read_call
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.pages import PageStore
from attnplug_transformers.paged import PagedBatches
from attnplug_transformers.steps import Step


class Attention:
    """What transformers calls in every layer, for one choice of backends."""

    def __init__(self, request: BackendRequest) -> None:
        self._store = PageStore(request)
        self._paged = PagedBatches(request, self._store)

    @torch.compiler.disable
    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Step | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """q ``[batch, heads, queries, dim]``, k and v ``[batch, kv_heads, columns, dim]``; returns ``[batch, queries,
        heads, v_dim]`` and no weights."""
        if others.get("cache") is not None:
            return self._paged.attend(module, query, key, value, attention_mask, dropout, scaling, others), None
        if not isinstance(attention_mask, Step):
            raise BridgeError(_no_step(module, attention_mask))
        step = attention_mask
        call = read_call(module, query, key, value, dropout, scaling, step.window, others)
        if (query.shape[0], query.shape[2], key.shape[2]) != (step.batch, step.queries, step.columns):
            raise BridgeError(
                f"{type(module).__name__} has {query.shape[0]} × {query.shape[2]} queries and {key.shape[2]} columns of "
                f"keys, and the step was prepared for {step.batch} × {step.queries} and {step.columns}; layers that share "
                "or compress their cache are not supported"
            )
        limits = Limits(step.batch, step.batch * max(step.queries, 1), step.columns)
        pages = self._store.pages(call.layer, query, limits)
        planned = step.planned(pages)
        extras = None if call.sinks is None else ForwardExtras(sinks=call.sinks)
        if step.is_fresh:
            new = step.rows(key[:, :, : step.queries]), step.rows(value[:, :, : step.queries])
            rows = pages.attention.attend(step.rows(query), *new, pages.layer, planned.batch, extras=extras)
        else:
            held = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (key, value))
            pages.pool.write(pages.layer.layer_id, planned.slots, *held)
            rows = pages.attention.attend(
                step.rows(query), None, None, pages.layer, planned.batch, save_kv_cache=False, extras=extras
            )
        return step.columns_of(rows), None


def _no_step(module: torch.nn.Module, mask: Tensor | None) -> str:
    name = type(module).__name__
    if mask is None:
        return (
            f"{name} was called without the mask that its model makes by transformers.masking_utils: nothing says which "
            "rows a request has; models that make their own masks are not supported"
        )
    return (
        f"{name} was given a mask of shape {list(mask.shape)}; backends derive what a token sees from lengths, so give "
        "attention_mask as [batch, tokens] with 0 for padding"
    )
