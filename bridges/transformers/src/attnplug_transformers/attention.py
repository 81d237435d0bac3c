"""Attention function that transformers calls for ``attnplug:NAME``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnplug import ForwardExtras
from attnplug.host import BackendRequest
from attnplug_transformers.cache import paged_layer_of
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.layer_call import autocast, check_call, is_last_attention, read_call, sinks_of
from attnplug_transformers.paged_attention import PagedBatches
from attnplug_transformers.pages import PageStore
from attnplug_transformers.static_cache import attend_static, new_caches
from attnplug_transformers.step import PaddedStep


class AttentionFunction:
    """Attention function of one backend request. transformers calls it in every layer."""

    def __init__(self, request: BackendRequest) -> None:
        self._request = request
        self._store = PageStore(request)
        self._paged = PagedBatches(request, self._store)
        self._number, self._static = new_caches(request)

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: PaddedStep | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend: query ``[batch, heads, queries, dim]``, key and value ``[batch, kv_heads, columns, dim]``. Returns
        ``[batch, queries, heads, v_dim]`` and no weights. Raises :class:`BridgeError` for unsupported calls."""
        if torch.is_autocast_enabled(query.device.type):  # as for sdpa; a backend's own operations are not cast
            query, key, value = (autocast(tensor) for tensor in (query, key, value))
            with torch.autocast(query.device.type, enabled=False):
                return self(module, query, key, value, attention_mask, dropout, scaling, **others)
        step = attention_mask
        if (
            torch.compiler.is_compiling()
            and isinstance(step, PaddedStep)
            and step.position is not None
            and step.columns == key.shape[2] > 1  # others than PagedCache
            and not self._static.breaks_graphs
        ):
            check_call(module, query, key, value, dropout, others)
            return self._decode(step, query, key, value, scaling, others), None
        return self._run(module, query, key, value, attention_mask, dropout, scaling, others), None

    def _decode(
        self, step: PaddedStep, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, others: dict[str, Any]
    ) -> Tensor:
        """Run a layer of a decode step in a compiled model."""
        softcap = others.get("softcap")
        shape = query.shape[1], key.shape[1], query.shape[3], value.shape[3], scaling, softcap, str(key.device)
        out: Tensor = attend_static(
            query,
            key,
            value,
            step.position,
            step.valid,
            sinks_of(others),
            step.window,
            query.shape[3] ** -0.5 if scaling is None else scaling,
            softcap,
            self._number,
            step.begins(*shape),
        )
        return out

    @torch.compiler.disable(reason="attnplug compiles decode steps only")  # type: ignore[untyped-decorator]
    def _run(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: PaddedStep | Tensor | None,
        dropout: float,
        scaling: float | None,
        others: dict[str, Any],
    ) -> Tensor:
        if others.get("cache") is not None:
            return self._paged.attend(module, query, key, value, attention_mask, dropout, scaling, others)
        step = attention_mask if isinstance(attention_mask, PaddedStep) else None
        call = read_call(module, query, key, value, dropout, scaling, None if step is None else step.window, others)
        if step is None:
            raise BridgeError(_mask_message(module, attention_mask))
        extras = None if call.sinks is None else ForwardExtras(sinks=call.sinks)
        layer, paged_layer = call.layer, paged_layer_of(key)
        if paged_layer is None:
            _check_shapes(module, query, key, step, step.columns)
            if step.is_fresh and step.columns > step.queries:  # only a static cache has columns to be written later
                self._static.register(module.layer_idx, key, value, layer)  # type: ignore[arg-type]
            elif step.position is not None and self._static.find(key, value) is not None:
                begins = step.begins(layer, key.device)
                return self._static.attend(
                    layer, query, key, value, step.position.to(key.device), step.valid, call.sinks, begins
                )
            if step.is_fresh and self._static.is_registering and is_last_attention(module):
                self._static.build()  # now: the next step may be one that a CUDA graph captures
            pages = self._store.pages(layer, query, step.limits)
        else:
            if others.get("use_cache") is False:
                raise BridgeError(
                    "a PagedCache is passed with use_cache=False, with which generate passes cached tokens again; pass "
                    "use_cache=True, or leave past_key_values out"
                )
            _check_shapes(module, query, key, step, step.queries)
            pages, layer = paged_layer.pages(module, self._request, layer, query, step)
        batch, slots = step.planned(pages)
        if paged_layer is not None or step.is_fresh:  # only new keys and values are written to pages
            new = step.rows(key[:, :, : step.queries]), step.rows(value[:, :, : step.queries])
            rows = pages.attention.attend(step.rows(query), *new, layer, batch, extras=extras)
        else:
            every = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (key, value))
            pages.pool.write(layer.layer_id, slots, *every)
            rows = pages.attention.attend(
                step.rows(query), None, None, layer, batch, save_kv_cache=False, extras=extras
            )
        return step.columns_of(rows)


def _check_shapes(module: torch.nn.Module, query: Tensor, key: Tensor, step: PaddedStep, columns: int) -> None:
    given = query.shape[0], query.shape[2], key.shape[2]
    if given != (step.batch, step.queries, columns):
        raise BridgeError(
            f"{type(module).__name__} has {given[0]} × {given[1]} queries and {given[2]} columns of keys, but the step "
            f"was prepared for {step.batch} × {step.queries} and {columns}; layers that share or compress their cache "
            "are not supported"
        )


def _mask_message(module: torch.nn.Module, mask: object) -> str:
    name = type(module).__name__
    if mask is None:
        return (
            f"{name} was called without the mask that its model makes with transformers.masking_utils, so the rows of "
            "a request are unknown; models that make their own masks are not supported"
        )
    assert isinstance(mask, Tensor)
    return (
        f"{name} was given a mask of shape {list(mask.shape)}; backends derive the visible tokens from lengths, so "
        "pass attention_mask as [batch, tokens] with 0 for padding"
    )
