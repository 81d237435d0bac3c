"""The attention function of our names."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import ForwardExtras
from attnplug.host import BackendRequest
from attnplug_transformers.cache import held_by
from attnplug_transformers.calls import read_call
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.paged import PagedBatches
from attnplug_transformers.pages import PageStore
from attnplug_transformers.steps import Step


class Attention:
    """What transformers calls in every layer, for one choice of backends."""

    def __init__(self, request: BackendRequest) -> None:
        self._request = request
        self._store = PageStore(request)
        self._paged = PagedBatches(request, self._store)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        extras = None if call.sinks is None else ForwardExtras(sinks=call.sinks)
        layer, held = call.layer, held_by(key)
        if held is None:
            _check_shapes(module, query, key, step, step.columns)
            pages = self._store.pages(layer, query, step.limits)
        else:
            _check_shapes(module, query, key, step, step.queries)
            pages, layer = held.pages(module, self._request, layer, query, step)
        batch, slots = step.planned(pages)
        if held is not None or step.is_fresh:  # the keys and values of new tokens are written to pages, and no others
            new = step.rows(key[:, :, : step.queries]), step.rows(value[:, :, : step.queries])
            rows = pages.attention.attend(step.rows(query), *new, layer, batch, extras=extras)
        else:
            every = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (key, value))
            pages.pool.write(layer.layer_id, slots, *every)
            rows = pages.attention.attend(
                step.rows(query), None, None, layer, batch, save_kv_cache=False, extras=extras
            )
        return step.columns_of(rows), None


def _check_shapes(module: torch.nn.Module, query: Tensor, key: Tensor, step: Step, columns: int) -> None:
    given = query.shape[0], query.shape[2], key.shape[2]
    if given != (step.batch, step.queries, columns):
        raise BridgeError(
            f"{type(module).__name__} has {given[0]} × {given[1]} queries and {given[2]} columns of keys, and the step "
            f"was prepared for {step.batch} × {step.queries} and {columns}; layers that share or compress their cache "
            "are not supported"
        )


def _no_step(module: torch.nn.Module, mask: Tensor | None) -> str:
    name = type(module).__name__
    if mask is None:
        return (
            f"{name} was called without the mask that its model makes by transformers.masking_utils: nothing says "
            "which rows a request has; models that make their own masks are not supported"
        )
    return (
        f"{name} was given a mask of shape {list(mask.shape)}; backends derive what a token sees from lengths, so give "
        "attention_mask as [batch, tokens] with 0 for padding"
    )
