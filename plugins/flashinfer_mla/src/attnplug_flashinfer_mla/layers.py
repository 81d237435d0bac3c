"""What every call on a layer starts with: its cache, where its new rows go, and the log-sum-exp that is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import BackendContext, BackendError, ForwardExtras, LayerSpec, PoolError
from attnplug_flashinfer_mla.kernels import Cache, Shape

_EXTRAS = frozenset({"lse"})


class MLALayers:
    """The MLA layers of one model, with their caches. ``context`` names the backend in errors."""

    def __init__(self, context: BackendContext, shape: Shape) -> None:
        if context.pools.mla is None:
            raise PoolError(f"backend {context.name} serves MLA layers, but there is no MLA pool")
        self._pool, self._name, self._shape = context.pools.mla, context.name, shape
        self._caches = {
            layer.layer_id: Cache.of(
                self._pool.rows(layer.layer_id).squeeze(2), layer.mla.kv_lora_rank, self._pool.scale(layer.layer_id)
            )
            for layer in context.model.layers
            if layer.mla is not None
        }

    def cache(self, layer: LayerSpec, q: Tensor) -> Cache:
        """The cache that a layer's queries ``[rows, heads, row_dim]`` attend to."""
        cache = self._caches.get(layer.layer_id)
        if cache is None:
            raise PoolError(f"layer {layer.layer_id} is not an MLA layer of the model that backend {self._name} serves")
        if q.shape[1] != self._shape.heads:
            raise BackendError(f"q has {q.shape[1]} heads, but the plan is for {self._shape.heads}")
        return cache

    def lse(self, q: Tensor, extras: ForwardExtras | None) -> Tensor | None:
        """Where the log-sum-exp is wanted, checked; any other extra is an error."""
        if extras is None:
            return None
        if unknown := extras.asked() - _EXTRAS:
            raise BackendError(
                f"backend {self._name} was asked for {', '.join(sorted(unknown))}; it knows {', '.join(_EXTRAS)}"
            )
        if extras.lse is not None:
            check_lse(extras.lse, q)
        return extras.lse

    def save(
        self,
        layer: LayerSpec,
        cache: Cache,
        slots: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rows: int,
        *,
        captured: bool,
    ) -> None:
        """Write the first ``rows`` of k to ``slots`` ``[rows]`` int64; -1 among them in captured batches only."""
        if k is None or v is not None:
            given = ", ".join(f"{n}={'None' if t is None else tuple(t.shape)}" for n, t in (("k", k), ("v", v)))
            raise BackendError(
                f"layer {layer.layer_id} ({layer.kind}) writes k and no v, but was given {given}; "
                "pass save_kv_cache=False where nothing is to be written"
            )
        if k.shape[0] < rows:
            raise BackendError(f"layer {layer.layer_id} was given {k.shape[0]} rows of k for {rows} planned ones")
        if k.shape[0] != rows:
            k = k[:rows]
        if captured or cache.flat.dtype is not k.dtype:
            self._pool.write(layer.layer_id, slots, k)
        else:
            cache.flat.index_copy_(0, slots, k)  # no padding, and slots of our own: nothing to check


def check_lse(lse: Tensor, q: Tensor) -> None:
    """Kernels write it as a plain block of memory, whatever it is."""
    if lse.shape != q.shape[:2] or lse.dtype is not torch.float32 or not lse.is_contiguous():
        raise BackendError(
            f"lse must be contiguous float32 of shape {tuple(q.shape[:2])} (tokens, heads), not {lse.dtype} of shape "
            f"{tuple(lse.shape)} with strides {lse.stride()}"
        )
