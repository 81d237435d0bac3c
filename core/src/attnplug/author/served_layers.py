"""The layers that a backend serves, and the checks of a call on one of them before a kernel runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.contract.backend import ForwardExtras
from attnplug.contract.context import BackendContext
from attnplug.contract.plan import Plan
from attnplug.contract.sparse import check_entries, check_selected
from attnplug.declare.errors import BackendError, PlanError, PoolError
from attnplug.declare.model import LayerSpec, MLADims
from attnplug.kv.buffer import torch_dtype
from attnplug.kv.pools import MLAPool

NewRows = tuple[Tensor, Tensor | None]
NOTHING = ForwardExtras()


class ServedLayers:
    """The full-attention layers of a context's model, by id, and the pools that hold their rows."""

    def __init__(self, context: BackendContext, extras: frozenset[str]) -> None:
        self._name, self._extras, self._embeds = context.name, extras, context.serving.is_embedding
        self._mha, self._mla = context.pools.mha, context.pools.mla
        self._queries = {
            layer.layer_id: (layer.num_heads, layer.head_dim if layer.mla is None else layer.mla.row_dim)
            for layer in context.model.full_layers
        }

    def check(self, layer: LayerSpec, q: Tensor, q_rope: Tensor | None = None) -> int:
        """Check that queries ``[rows, heads, width]`` are for a layer that the backend serves; returns their rows."""
        wanted = self._queries.get(layer.layer_id)
        if wanted is None:
            raise PoolError(
                f"layer {layer.layer_id} is not a full-attention layer of the model that backend {self._name} serves"
            )
        if q.dim() != 3:
            raise BackendError(f"layer {layer.layer_id}: q has shape {tuple(q.shape)}; give [rows, heads, width]")
        rows, heads, width = q.shape
        if q_rope is not None:
            width = self._joined_width(layer, q, q_rope)
        if (heads, width) != wanted:
            raise BackendError(
                f"layer {layer.layer_id}: q has (heads, width) {(heads, width)}, but on this rank it has {wanted}"
            )
        return rows

    @staticmethod
    def _joined_width(layer: LayerSpec, q: Tensor, q_rope: Tensor) -> int:
        """The width of absorbed queries that come in two parts."""
        rank, rope = (0, 0) if layer.mla is None else (layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim)
        if q.shape[2] != rank or q_rope.shape != (*q.shape[:2], rope) or q_rope.dtype is not q.dtype:
            raise BackendError(
                f"layer {layer.layer_id}: q has shape {tuple(q.shape)} and extras.q_rope is {q_rope.dtype} of shape "
                f"{tuple(q_rope.shape)}; give the latent part [rows, heads, {rank}] and the rotary part [rows, heads, "
                f"{rope}] of an MLA layer, both in {q.dtype}"
            )
        return rank + rope

    def wanted(self, layer: LayerSpec, q: Tensor, extras: ForwardExtras | None) -> ForwardExtras:
        """What a call asks for, checked. An extra that the backend does not claim is an error."""
        if extras is None:
            if layer.sinks:
                self._refuse_sinks(layer, NOTHING)
            if layer.indexer is not None:
                check_selected(None, layer, q.shape[0], self._name)
            return NOTHING
        if unknown := extras.asked() - self._extras:
            raise BackendError(
                f"backend {self._name} was asked for {', '.join(sorted(unknown))}; "
                f"it knows {', '.join(sorted(self._extras)) or 'no extras'}"
            )
        if extras.lse is not None:
            check_lse(extras.lse, q)
        if layer.sinks != (extras.sinks is not None):
            self._refuse_sinks(layer, extras)
        if extras.sinks is not None and extras.sinks.shape != q.shape[1:2]:
            raise BackendError(f"extras.sinks has shape {tuple(extras.sinks.shape)}, but q has {q.shape[1]} heads")
        if extras.selected is not None or layer.indexer is not None:
            check_selected(extras.selected, layer, q.shape[0], self._name)
        if extras.entries is not None:
            check_entries(extras.entries, layer, output_width(layer), q.shape[0])
        shape = (*q.shape[:2], output_width(layer))
        if extras.out is not None and (extras.out.shape != shape or extras.out.dtype is not q.dtype):
            raise BackendError(
                f"extras.out is {extras.out.dtype} of shape {tuple(extras.out.shape)}; the result is {q.dtype} of "
                f"shape {shape}"
            )
        return extras

    @staticmethod
    def _refuse_sinks(layer: LayerSpec, extras: ForwardExtras) -> None:
        given = "were given" if extras.sinks is not None else "were not given"
        raise BackendError(
            f"layer {layer.layer_id} has sinks={layer.sinks}, but extras.sinks {given}; give them for such layers, "
            "and for no others"
        )

    def new_rows(self, layer: LayerSpec, k: Tensor | None, v: Tensor | None, rows: int) -> NewRows:
        """The first ``rows`` rows of k and v, checked. An MLA layer has no v."""
        if k is None or (v is None) != (layer.mla is not None):
            given = ", ".join(f"{n}={'None' if t is None else tuple(t.shape)}" for n, t in (("k", k), ("v", v)))
            raise BackendError(
                f"layer {layer.layer_id} ({layer.kind}) brings {'k and v' if layer.mla is None else 'k and no v'}, but "
                f"was given {given}; pass save_kv_cache=False where its rows are in the cache already"
            )
        if k.shape[0] < rows or (v is not None and v.shape[0] < rows):
            given = f"{k.shape[0]} rows of k" + ("" if v is None else f" and {v.shape[0]} of v")
            raise BackendError(f"layer {layer.layer_id} was given {given} for {rows} planned ones")
        return k if k.shape[0] == rows else k[:rows], v if v is None or v.shape[0] == rows else v[:rows]

    def write(self, layer: LayerSpec, plan: Plan, new: NewRows) -> None:
        """Write new rows to the plan's slots, except where a slot is -1.

        Only a backend that embeds prompts may do without slots: it attends to rows at hand, and writes nothing.
        """
        if plan.new_slots is None:
            if self._embeds:
                return
            raise PlanError(
                f"backend {self._name} is to write the new rows of layer {layer.layer_id}, and its plan has no "
                "new_slots; make the plan with Plan.of(backend_id, geometry, metadata, geometry.new_slots())"
            )
        k, v = new
        if v is None:
            if self._mla is None:
                raise PoolError(f"layer {layer.layer_id} is MLA, but backend {self._name} has no MLA pool")
            self._mla.write(layer.layer_id, plan.new_slots, k)
        else:
            if self._mha is None:
                raise PoolError(f"layer {layer.layer_id} is MHA, but backend {self._name} has no MHA pool")
            self._mha.write(layer.layer_id, plan.new_slots, k, v)


def output_width(layer: LayerSpec) -> int:
    """The width of a row of the result: that of values, or of latents for absorbed MLA."""
    return layer.v_head_dim if layer.mla is None else layer.mla.kv_lora_rank


def check_lse(lse: Tensor, q: Tensor) -> None:
    """Refuse an ``lse`` that a kernel cannot fill: kernels write it as one plain block of memory."""
    if lse.shape != q.shape[:2] or lse.dtype is not torch.float32 or not lse.is_contiguous():
        raise BackendError(
            f"lse must be contiguous float32 of shape {tuple(q.shape[:2])} (tokens, heads), not {lse.dtype} of shape "
            f"{tuple(lse.shape)} with strides {lse.stride()}"
        )


_COPIED = 16
"""Bytes that libraries' kernels copy at once."""


def check_rows(pages: Tensor, name: str, library: str) -> None:
    """Refuse a cache ``[pages, page_size, kv_heads, dim]`` that a library's kernels cannot read where it lies. Its
    pages, tokens and heads may have any strides that are multiples of 16 bytes."""
    outer = [stride for stride, size in zip(pages.stride()[:-1], pages.shape[:-1], strict=True) if size > 1]
    places = [stride * pages.element_size() for stride in outer] + [pages.data_ptr()]
    if pages.stride(-1) != 1 or any(place % _COPIED for place in places):
        raise PoolError(
            f"{name} have strides {pages.stride()} at address {pages.data_ptr():#x}; {library} reads rows with "
            f"adjacent columns, at multiples of {_COPIED} bytes"
        )


@dataclass(frozen=True, slots=True, eq=False)
class MLAShape:
    """The shape of a model's MLA layers on this rank, which are all alike, and the pool that holds their rows."""

    pool: MLAPool
    heads: int
    dims: MLADims
    v_head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, context: BackendContext) -> MLAShape:
        layers = [layer for layer in context.model.full_layers if layer.mla is not None]
        if context.pools.mla is None or not layers:
            raise PoolError(f"backend {context.name} serves MLA layers, and needs a model and a pool with some")
        first = layers[0]
        assert first.mla is not None
        return cls(
            context.pools.mla,
            first.num_heads,
            first.mla,
            first.v_head_dim,
            first.scale,
            context.page_size,
            context.dtype,
            torch_dtype(context.kv_dtype),
        )

    @property
    def ragged_dims(self) -> tuple[int, int]:
        """Widths of a key and of a value, as MHA."""
        return self.dims.qk_nope_head_dim + self.dims.qk_rope_head_dim, self.v_head_dim
