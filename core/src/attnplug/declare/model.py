"""Attention layers of a model, as plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from attnplug.declare.errors import UsageError


class AttentionKind(StrEnum):
    """Family of a layer's attention."""

    MHA = "mha"
    """Softmax attention over K and V heads; grouped-query and multi-query are MHA with fewer KV heads."""
    MLA = "mla"
    """Multi-head latent attention: one compressed row per token in the cache."""
    GDN = "gdn"
    KDA = "kda"
    LIGHTNING = "lightning"
    MAMBA2 = "mamba2"
    SHORT_CONV = "short_conv"

    @property
    def is_linear(self) -> bool:
        """True if a layer has a recurrent state per request instead of cache rows per token."""
        return self not in (AttentionKind.MHA, AttentionKind.MLA)


class Feature(StrEnum):
    """Requirement of a layer beyond plain softmax attention."""

    SLIDING_WINDOW = "sliding_window"
    LOGIT_CAP = "logit_cap"
    SINKS = "sinks"
    SPARSE = "sparse"
    COMPRESSED = "compressed"


@dataclass(frozen=True, slots=True)
class MLADims:
    """Dimensions of a latent-attention layer. A cache row is ``[kv_lora_rank | qk_rope_head_dim]``."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int

    @property
    def row_dim(self) -> int:
        """Width of one cache row, and of one absorbed query row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class IndexerDims:
    """Indexer of a sparse layer: ``heads`` small heads score every visible row, and the layer attends to the best
    ``topk``, or to all rows of a shorter request.

    Cached index keys ``[rows, head_dim]`` are shared by all heads. Every rank has the whole indexer.
    """

    heads: int
    head_dim: int
    topk: int
    shares: int | None = None
    """Id of the layer whose selection this layer reuses. It then has no index and caches no keys."""

    @property
    def scale(self) -> float:
        """Scale of the product of an index query and key."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class CompressedDims:
    """Compression of a layer's rows: each window of ``ratio`` tokens becomes one entry, which has the format of a row.

    A query at position p attends to the rows of its sliding window and to the entries of complete windows: entries
    0 … (p + 1) // ratio - 1, or those among them that an indexer selects. With ``overlap`` an entry combines two
    series: one of its own window's tokens and one of the previous window's. Entries are ``[entries, 1, row_dim]``.
    """

    ratio: int
    overlap: bool = False

    @property
    def series(self) -> int:
        """Number of series, and so of values per token for each value of an entry."""
        return 2 if self.overlap else 1

    @property
    def span(self) -> int:
        """Number of tokens that one entry combines."""
        return self.ratio * self.series


@dataclass(frozen=True, slots=True)
class LinearDims:
    """Dimensions of a linear layer's state, per request.

    The recurrent state is ``[heads, key_dim, value_dim]`` float32 (none if ``heads`` is 0), the convolution state
    ``[conv_channels, conv_width]`` (none if ``conv_width`` is 0).
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int = 0
    conv_width: int = 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, with the heads of the whole model or, by ``for_rank``, of one rank.

    Selection uses whole layers; pools, contexts and forward calls use a rank's layers. ``head_dim`` is the width of
    queries and keys in the model's equations (for MLA: nope + rope), ``v_head_dim`` that of values. A query at position
    p attends to positions p - ``sliding_window`` + 1 … p. Example, with 8 query and 2 KV heads:
    ``LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, scale=0.125)``.
    """

    layer_id: int
    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    sliding_window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    indexer: IndexerDims | None = None
    mla: MLADims | None = None
    linear: LinearDims | None = None
    compressed: CompressedDims | None = None

    def __post_init__(self) -> None:
        for mistake in self._mistakes():
            raise ValueError(f"layer {self.layer_id}: {mistake}")

    def _mistakes(self) -> Iterator[str]:
        if (self.kind is AttentionKind.MLA) != (self.mla is not None):
            yield f"kind {self.kind} and mla={self.mla} contradict each other"
        if self.kind.is_linear != (self.linear is not None):
            yield f"kind {self.kind} and linear={self.linear} contradict each other"
        if self.kind is AttentionKind.MHA and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            yield f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
        if self.indexer is not None and self.kind.is_linear:
            yield f"kind {self.kind} has no rows to select from, so it cannot have an indexer"
        if self.compressed is not None and (self.mla is None or self.sliding_window is None):
            yield f"a compressed layer must be of kind {AttentionKind.MLA} and have a sliding_window"

    def for_rank(self, size: int) -> LayerSpec:
        """Return this layer with the number of heads of each of ``size`` ranks.

        Query heads are divided evenly. KV heads are divided, or replicated if there are more ranks than KV heads. The
        latent of MLA is whole on every rank. Raises UsageError if the heads cannot be divided.
        """
        if size < 1:
            raise UsageError(f"{size} is not a number of ranks; give 1 or more")
        if size == 1:
            return self
        if self.linear is not None:
            dims = self.linear
            if not dims.heads:  # a convolution alone
                channels = _part(dims.conv_channels, size, "convolution channels", self.layer_id)
                return replace(self, linear=replace(dims, conv_channels=channels))
            heads = _part(dims.heads, size, "linear-attention heads", self.layer_id)
            key_heads = _part(dims.key_heads, size, "key heads", self.layer_id, replicated=True)
            # A convolution has the channels of the rank's heads.
            channels = 2 * key_heads * dims.key_dim + heads * dims.value_dim if dims.conv_width else dims.conv_channels
            own = replace(dims, heads=heads, key_heads=key_heads, conv_channels=channels)
            return replace(self, num_heads=heads, num_kv_heads=key_heads, linear=own)
        return replace(
            self,
            num_heads=_part(self.num_heads, size, "query heads", self.layer_id),
            num_kv_heads=_part(self.num_kv_heads, size, "KV heads", self.layer_id, replicated=True),
        )

    @property
    def features(self) -> frozenset[Feature]:
        """Features that this layer requires of a backend."""
        present = {
            Feature.SLIDING_WINDOW: self.sliding_window is not None,
            Feature.LOGIT_CAP: self.logit_cap is not None,
            Feature.SINKS: self.sinks,
            Feature.SPARSE: self.indexer is not None,
            Feature.COMPRESSED: self.compressed is not None,
        }
        return frozenset(feature for feature, needed in present.items() if needed)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Attention layers of a model, ordered by ``layer_id``: ``ModelSpec("mine", "llama", layers, 4096)``.

    ``ranks`` is 1 if the layers have the heads of the whole model, ``n`` if they have those of one of ``n`` ranks.
    """

    name: str
    model_type: str
    layers: tuple[LayerSpec, ...]
    context_length: int
    dtype: str | None = None
    ranks: int = 1

    def for_rank(self, size: int) -> ModelSpec:
        """Return this model with the heads of each of ``size`` ranks; see ``LayerSpec.for_rank``."""
        if self.ranks != 1:
            raise ValueError(f"{self.name} is already divided among {self.ranks} ranks; divide the whole model")
        return replace(self, layers=tuple(layer.for_rank(size) for layer in self.layers), ranks=size)

    @property
    def kinds(self) -> frozenset[AttentionKind]:
        return frozenset(layer.kind for layer in self.layers)

    @property
    def full_layers(self) -> tuple[LayerSpec, ...]:
        """Layers with cache rows per token: MHA, GQA, MLA."""
        return tuple(layer for layer in self.layers if not layer.kind.is_linear)

    @property
    def linear_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if layer.kind.is_linear)

    @property
    def is_sparse(self) -> bool:
        """True if some layers attend to rows that an indexer selects."""
        return any(layer.indexer is not None for layer in self.layers)

    @property
    def index_layers(self) -> tuple[LayerSpec, ...]:
        """Layers that cache an index key per token, not per entry as compressed ones do, and share no other's index."""
        return tuple(
            layer
            for layer in self.layers
            if layer.indexer is not None and layer.indexer.shares is None and layer.compressed is None
        )

    @property
    def compressed_layers(self) -> tuple[LayerSpec, ...]:
        """Layers that attend to compressed entries."""
        return tuple(layer for layer in self.layers if layer.compressed is not None)

    @property
    def page_multiple(self) -> int:
        """Number of tokens that divides every valid page size, so that no page ends inside a compressed window."""
        return math.lcm(*(layer.compressed.ratio for layer in self.layers if layer.compressed is not None))

    def describe(self) -> str:
        """Return one line with the number of layers of each kind and shape."""
        shapes = Counter(map(_shape, self.layers))
        return f"{self.name}: " + ", ".join(f"{count} × {shape}" for shape, count in shapes.items())


def _part(count: int, size: int, noun: str, layer_id: int, *, replicated: bool = False) -> int:
    """Return one rank's share of ``count``; with ``replicated``, 1 if ``size`` is a multiple of ``count``."""
    if count % size and not (replicated and size % count == 0):
        raise UsageError(
            f"layer {layer_id}: {count} {noun} cannot be divided over {size} ranks; use a number of ranks that "
            f"divides {count}" + " or is a multiple of it" * replicated
        )
    return max(count // size, 1)


def _shape(layer: LayerSpec) -> str:
    extra = "".join(f" +{feature}" for feature in sorted(layer.features))
    if layer.indexer is not None:
        own = f"index {layer.indexer.heads}×{layer.indexer.head_dim}"
        extra += f" (top {layer.indexer.topk}, {own if layer.indexer.shares is None else 'shared index'})"
    if layer.compressed is not None:
        extra += f" (an entry for {layer.compressed.ratio} tokens, window {layer.sliding_window})"
    if layer.mla is not None:
        return f"mla heads {layer.num_heads}, latent {layer.mla.kv_lora_rank}+{layer.mla.qk_rope_head_dim}{extra}"
    if layer.linear is not None:
        return f"{layer.kind} heads {layer.linear.heads}, state {layer.linear.key_dim}×{layer.linear.value_dim}{extra}"
    dims = f"{layer.head_dim}" if layer.head_dim == layer.v_head_dim else f"{layer.head_dim}/{layer.v_head_dim}"
    return f"mha heads {layer.num_heads}/{layer.num_kv_heads}, dim {dims}{extra}"
