"""Layers that a backend serves, and validation of calls: of arguments before a kernel runs, and of first results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from attnplug.contract.backend import AttentionBackend, ForwardExtras, bind_optional_hook, hook_signatures
from attnplug.contract.batch import ForwardBatch, Plan, describe_result
from attnplug.contract.context import BackendContext
from attnplug.contract.inputs import check_selected
from attnplug.declare.errors import BackendError, PlanError, PoolError
from attnplug.declare.model import LayerSpec, MLADims
from attnplug.kv.pools import MLAPool

NewRows = tuple[Tensor, Tensor | None]
"""(k, v) of the planned rows: ``[rows, kv_heads, dim]`` each, or the latent rows ``[rows, dim]`` and ``None``."""
NO_EXTRAS = ForwardExtras()


class ServedLayers:
    """Full-attention layers of a context's model, and the pools that hold their rows."""

    def __init__(self, context: BackendContext, extras: frozenset[str]) -> None:
        self._name, self._extras, self._embeds = context.name, extras, context.serving.is_embedding
        self._mha, self._mla = context.pools.mha, context.pools.mla
        self._queries = {
            layer.layer_id: (layer.num_heads, layer.head_dim if layer.mla is None else layer.mla.row_dim)
            for layer in context.model.full_layers
        }

    def check(self, layer: LayerSpec, q: Tensor, q_rope: Tensor | None = None) -> int:
        """Validate a layer and its queries ``[rows, heads, width]``; return the number of rows."""
        wanted = self._queries.get(layer.layer_id)
        if wanted is None:
            raise PoolError(
                f"layer {layer.layer_id} is not a full-attention layer of the model that backend {self._name} serves"
            )
        if q.dim() != 3:
            raise BackendError(f"layer {layer.layer_id}: q has shape {tuple(q.shape)}; give [rows, heads, width]")
        rows, heads, width = q.shape
        if q_rope is not None:
            rank, rope = (0, 0) if layer.mla is None else (layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim)
            if width != rank or q_rope.shape != (rows, heads, rope) or q_rope.dtype is not q.dtype:
                raise BackendError(
                    f"layer {layer.layer_id}: q has shape {tuple(q.shape)} and extras.q_rope is {q_rope.dtype} of "
                    f"shape {tuple(q_rope.shape)}; give the latent part [rows, heads, {rank}] and the rotary part "
                    f"[rows, heads, {rope}] of an MLA layer, both in {q.dtype}"
                )
            width = rank + rope
        if (heads, width) != wanted:
            raise BackendError(
                f"layer {layer.layer_id}: q has (heads, width) {(heads, width)}, but on this rank it has {wanted}"
            )
        return rows

    def check_extras(self, layer: LayerSpec, q: Tensor, extras: ForwardExtras | None) -> ForwardExtras:
        """Validate and return the extras of a call. Raises BackendError for one that the backend does not claim."""
        extras = NO_EXTRAS if extras is None else extras
        if unclaimed := extras.given() - self._extras:
            raise BackendError(
                f"backend {self._name} was called with {', '.join(sorted(unclaimed))}; "
                f"it supports {', '.join(sorted(self._extras)) or 'no extras'}"
            )
        if extras.lse is not None:
            check_lse(extras.lse, q)
        if layer.sinks != (extras.sinks is not None):
            given = "were not given; give them" if layer.sinks else "were given; leave them out"
            raise BackendError(f"layer {layer.layer_id} has sinks={layer.sinks}, but extras.sinks {given}")
        if extras.sinks is not None and extras.sinks.shape != q.shape[1:2]:
            raise BackendError(f"extras.sinks has shape {tuple(extras.sinks.shape)}, but q has {q.shape[1]} heads")
        if extras.selected is not None or layer.indexer is not None:
            check_selected(extras.selected, layer, q.shape[0], self._name)
        shape = (*q.shape[:2], output_width(layer))
        if extras.out is not None and (extras.out.shape != shape or extras.out.dtype is not q.dtype):
            raise BackendError(
                f"extras.out is {extras.out.dtype} of shape {tuple(extras.out.shape)}; the result is {q.dtype} of "
                f"shape {shape}"
            )
        return extras

    def new_rows(self, layer: LayerSpec, k: Tensor | None, v: Tensor | None, rows: int) -> NewRows:
        """Validate k and v and return their first ``rows`` rows. An MLA layer has no v."""
        if k is None or (v is None) != (layer.mla is not None):
            given = ", ".join(f"{n}={'None' if t is None else tuple(t.shape)}" for n, t in (("k", k), ("v", v)))
            raise BackendError(
                f"layer {layer.layer_id} ({layer.kind}) requires {'k and v' if layer.mla is None else 'k and no v'}, "
                f"but was given {given}; pass save_kv_cache=False if its rows are in the cache already"
            )
        if k.shape[0] < rows or (v is not None and v.shape[0] < rows):
            given = f"{k.shape[0]} rows of k" + ("" if v is None else f" and {v.shape[0]} of v")
            raise BackendError(f"layer {layer.layer_id} was given {given} for {rows} planned ones")
        return k if k.shape[0] == rows else k[:rows], v if v is None or v.shape[0] == rows else v[:rows]

    def write(self, layer: LayerSpec, plan: Plan, new: NewRows) -> None:
        """Write new rows to the plan's slots; -1 marks a row that is not written.

        Only an embedding backend may plan without slots: it attends to rows passed as arguments and writes nothing.
        """
        if plan.new_slots is None:
            if self._embeds:
                return
            raise PlanError(
                f"backend {self._name} must write the new rows of layer {layer.layer_id}, but its plan has no "
                "new_slots; make the plan with Plan.of(backend_id, geometry, metadata, geometry.new_slots())"
            )
        k, v = new
        if v is None and self._mla is not None:
            self._mla.write(layer.layer_id, plan.new_slots, k)
        elif v is not None and self._mha is not None:
            self._mha.write(layer.layer_id, plan.new_slots, k, v)
        else:
            kind = str(layer.kind).upper()
            raise PoolError(f"layer {layer.layer_id} is {kind}, but backend {self._name} has no {kind} pool")


def output_width(layer: LayerSpec) -> int:
    """Return the width of outputs ``[tokens, heads, width]``: that of values, or of the latent for absorbed MLA."""
    return layer.v_head_dim if layer.mla is None else layer.mla.kv_lora_rank


def check_lse(lse: Tensor, q: Tensor) -> None:
    """Raise BackendError unless ``lse`` is contiguous float32 ``[tokens, heads]``, as kernels write it."""
    if lse.shape != q.shape[:2] or lse.dtype is not torch.float32 or not lse.is_contiguous():
        raise BackendError(
            f"lse must be contiguous float32 of shape {tuple(q.shape[:2])} (tokens, heads), not {lse.dtype} of shape "
            f"{tuple(lse.shape)} with strides {lse.stride()}"
        )


_COPY_BYTES = 16  # size of a vector copy in libraries' kernels


def check_rows(pages: Tensor, name: str, library: str) -> None:
    """Raise PoolError for a cache ``[pages, page_size, kv_heads, dim]`` that a library's kernels cannot read in place.

    Pages, tokens and heads may have any strides that are multiples of 16 bytes.
    """
    outer = [stride for stride, size in zip(pages.stride()[:-1], pages.shape[:-1], strict=True) if size > 1]
    offsets = [stride * pages.element_size() for stride in outer] + [pages.data_ptr()]
    if pages.stride(-1) != 1 or any(offset % _COPY_BYTES for offset in offsets):
        raise PoolError(
            f"{name} have strides {pages.stride()} at address {pages.data_ptr():#x}; {library} reads rows with "
            f"adjacent columns, at multiples of {_COPY_BYTES} bytes"
        )


@dataclass(frozen=True, slots=True, eq=False)
class MLAShape:
    """Common shape of a model's MLA layers on this rank, and the pool of their rows: ``MLAShape.of(context)``."""

    pool: MLAPool
    heads: int
    dims: MLADims
    v_head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Dtype of the pool's memory."""

    @classmethod
    def of(cls, context: BackendContext) -> MLAShape:
        layers = [layer for layer in context.model.full_layers if layer.mla is not None]
        if (pool := context.pools.mla) is None or not layers:
            raise PoolError(f"backend {context.name} serves MLA layers; it needs a model and a pool with some")
        first, kv_dtype = layers[0], pool.rows(layers[0].layer_id).dtype
        assert first.mla is not None
        own = (first.num_heads, first.mla, first.v_head_dim, first.scale)
        return cls(pool, *own, context.page_size, context.dtype, kv_dtype)

    @property
    def ragged_dims(self) -> tuple[int, int]:
        """(key, value) widths when MLA runs as MHA."""
        return self.dims.qk_nope_head_dim + self.dims.qk_rope_head_dim, self.v_head_dim


EXPECTED_RESULTS: dict[str, Callable[..., tuple[tuple[int, ...], Tensor]]] = {
    **dict.fromkeys(
        ("forward_extend", "forward_decode"), lambda q, k, v, layer, _: ((*q.shape[:2], output_width(layer)), q)
    ),
    "forward_ragged": lambda q, k, v, *_: ((*q.shape[:2], v.shape[-1]), q),
    "forward_conv": lambda x, *_: (tuple(x.shape), x),
    "forward_linear": lambda inputs, *_: (tuple(inputs.v.shape), inputs.v),
    "forward_delta": lambda inputs, *_: ((len(inputs.rows), inputs.gate[0].numel()), inputs.rows),
}
"""Functions of a call's positional arguments: shape of its result, and a tensor with its dtype and device."""


def bind_forward(holder: object, attribute: str, backend: AttentionBackend, name: str) -> Any:
    """Bind a method that runs a layer: ``self.run = bind_forward(self, "run", backend, "forward_ragged")``.

    Returns ``None`` if there is none. The function raises a BackendError, with plugin and method, for a result that is
    no tensor of the required shape, dtype and device. It checks the first call of each layer. When a layer runs for the
    second time, it replaces itself in ``attribute`` of the holder by the method.
    """
    method = bind_optional_hook(backend, name) if name in hook_signatures() else getattr(backend, name, None)
    if method is None:
        return None
    owner, checked = ref(holder), set[int]()  # a cycle would keep the holder's pools in memory

    def first_results(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        layer = next(each for each in args if isinstance(each, LayerSpec))
        if layer.layer_id in checked:
            setattr(owner(), attribute, method)
        elif result is not None or name != "forward_delta":  # which may leave a batch to its parts
            (shape, like), out = EXPECTED_RESULTS[name](*args), getattr(kwargs.get("extras"), "out", None)
            wanted, problem = f"{like.dtype} of shape {shape} on {like.device}", ""
            if not isinstance(result, Tensor) or describe_result(result) != wanted:
                problem = f"{describe_result(result)}; it must return {wanted}"
            elif out is not None and result.data_ptr() != out.data_ptr():
                problem = (
                    "other memory than extras.out, which it was given and claims; it must write to it and return it"
                )
            if problem:
                plans = [each for each in args if isinstance(each, Plan)]
                plans += [each.plan.attention for each in args if isinstance(each, ForwardBatch) and each.plan]
                # A wrapper's plan has a planner for each kind of layer.
                who = plans[0].planners()[-1 if layer.kind.is_linear else 0] if plans else backend.backend_id
                raise BackendError(f"{name} of {who.label} returned {problem} (layer {layer.layer_id})")
            checked.add(layer.layer_id)
        return result

    return first_results
