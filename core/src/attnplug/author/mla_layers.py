"""What every absorbed call on an MLA layer starts with, whatever kernel runs it."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.contract.backend import ForwardExtras
from attnplug.contract.context import BackendContext
from attnplug.declare.errors import BackendError, PoolError
from attnplug.declare.model import LayerSpec

_EXTRAS = frozenset({"lse"})


class MLALayers:
    """The MLA layers that a backend serves: their queries, new rows and log-sum-exps, checked before a kernel runs.

    ``context`` names the backend in errors. Heads, of this rank, and the width of latents are the first layer's.
    """

    def __init__(self, context: BackendContext) -> None:
        layers = [layer for layer in context.model.layers if layer.mla is not None]
        if context.pools.mla is None or not layers:
            raise PoolError(f"backend {context.name} serves MLA layers, and needs a model and a pool with some")
        first = layers[0]
        assert first.mla is not None
        self.pool, self.heads = context.pools.mla, first.num_heads // context.parallel.size
        self.kv_lora_rank = first.mla.kv_lora_rank
        self._name, self._ids = context.name, frozenset(layer.layer_id for layer in layers)

    def check(self, layer: LayerSpec, q: Tensor) -> None:
        """That these queries ``[rows, heads, row_dim]`` are for a layer that there is a plan for."""
        if layer.layer_id not in self._ids:
            raise PoolError(f"layer {layer.layer_id} is not an MLA layer of the model that backend {self._name} serves")
        if q.shape[1] != self.heads:
            raise BackendError(f"q has {q.shape[1]} heads, but the plan is for {self.heads}")

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

    def save(self, layer: LayerSpec, slots: Tensor, k: Tensor | None, v: Tensor | None, rows: int) -> None:
        """Write the first ``rows`` of k to ``slots`` ``[rows]`` int64, but not where a slot is -1."""
        if k is None or v is not None:
            given = ", ".join(f"{n}={'None' if t is None else tuple(t.shape)}" for n, t in (("k", k), ("v", v)))
            raise BackendError(
                f"layer {layer.layer_id} ({layer.kind}) writes k and no v, but was given {given}; "
                "pass save_kv_cache=False where nothing is to be written"
            )
        if k.shape[0] < rows:
            raise BackendError(f"layer {layer.layer_id} was given {k.shape[0]} rows of k for {rows} planned ones")
        self.pool.write(layer.layer_id, slots, k if k.shape[0] == rows else k[:rows])


def check_lse(lse: Tensor, q: Tensor) -> None:
    """Kernels write it as a plain block of memory, whatever it is."""
    if lse.shape != q.shape[:2] or lse.dtype is not torch.float32 or not lse.is_contiguous():
        raise BackendError(
            f"lse must be contiguous float32 of shape {tuple(q.shape[:2])} (tokens, heads), not {lse.dtype} of shape "
            f"{tuple(lse.shape)} with strides {lse.stride()}"
        )
