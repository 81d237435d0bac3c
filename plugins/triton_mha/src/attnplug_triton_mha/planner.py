"""Split-KV schedules of batches, computed on the device from lengths and page tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardMode, Geometry, LayerSpec
from attnplug_triton_mha.configurations import (
    PACKS,
    MergeConfig,
    MHAKernelConfig,
    max_parts,
    merge_config,
    merges_separately,
    split_merge_config,
)
from attnplug_triton_mha.triton_plan import RECORD_NUMBERS, SPLIT_TILE_NUMBERS, TILE_NUMBERS, launch_plan
from attnplug_triton_mha.triton_splits import SHORT_SPLITS, max_splits

_MERGED_ROWS = 16
"""Maximum rows that a fused merge processes at once."""
_SPLIT_BYTES = 256 << 20
"""Maximum memory per lane for partial results of splits at absolute positions. Decodes of 64 requests with 32 heads of
128 columns use 170 MB, if each has 65536 cache rows."""
_NEW_TOKENS = 4
"""New tokens per request for which partial results are allocated. With more tokens, tiles have fewer splits."""
_FIXED_NEW = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes in which all batches of an engine have the same number of new tokens per request."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes that kernels are chosen by: requests, new tokens of each, and cache rows that each may have.

    ``uniform``: all requests have the same number of new tokens, so a separate kernel may merge splits.
    """

    requests: int
    new: int
    cache_rows: int
    uniform: bool

    @classmethod
    def of(cls, geometry: Geometry) -> BatchSizes:
        """Return a batch's own sizes."""
        cache_rows = geometry.page_table.shape[1] * geometry.page_size
        return cls(geometry.requests, geometry.max_new, cache_rows, geometry.new_lens is None)

    @classmethod
    def rounded(cls, geometry: Geometry, max_context: int) -> BatchSizes:
        """Return the sizes of a batch that is not captured: powers of two, and the longest context. A warm-up runs
        these, so that requests launch no other kernels (E1)."""
        requests, uniform = _power_of_two(geometry.requests), geometry.new_lens is None
        if geometry.mode in _FIXED_NEW:
            return cls(requests, geometry.max_new, max_context, uniform)
        # A warm-up runs one prompt of each length, but not several of each.
        return cls(requests, _power_of_two(geometry.max_new), max_context, uniform and requests == 1)


def _power_of_two(number: int) -> int:
    """Return the next power of two."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class TritonLayerShape:
    """Attention parameters that a schedule depends on. Layers of the same shape share a schedule."""

    kv_heads: int
    group: int
    """Query heads per KV head."""
    dim: int
    v_dim: int
    window: int
    """Sliding window in keys; 0 for none."""
    format: int = 0
    """Number of the cache's format."""

    @classmethod
    def of(cls, layer: LayerSpec, format: int = 0) -> TritonLayerShape:
        group = layer.num_heads // layer.num_kv_heads
        return cls(layer.num_kv_heads, group, layer.head_dim, layer.v_head_dim, layer.sliding_window or 0, format)

    @property
    def width(self) -> int:
        """Key dim, padded for tensor cores."""
        return padded(self.dim, PACKS[self.format])

    @property
    def v_width(self) -> int:
        return padded(self.v_dim, PACKS[self.format])


def padded(width: int, pack: int = 1) -> int:
    """Return the next power of two, as Triton's tensors require; at least 32, and 16 for each of ``pack`` tensors."""
    return max(32, 16 * pack, 1 << (width - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class SeparateMerge:
    """Input of the separate merge kernel: ``tiles`` ``[requests * tiles_per_request, TILE_NUMBERS]`` int32
    (``SPLIT_TILE_NUMBERS`` for splits at absolute positions), and its configuration. ``SplitKVSchedule.fill`` fills
    ``tiles``."""

    tiles: Tensor
    config: MergeConfig


@dataclass(frozen=True, slots=True, eq=False)
class SplitKVSchedule:
    """Split-KV schedule of a batch for layers of one shape.

    ``records`` ``[programs, RECORD_NUMBERS]`` int32 are filled on the device by ``fill``. ``rows`` is the number of
    query rows of the batch, ``queries`` the new tokens per request (0 if they differ), ``most`` their maximum.
    ``target`` programs per KV head share the work. Without ``separate_merge``, the merge is fused into the attention
    kernel. ``partial_rows`` is the maximum number of rows of partial results per KV head; each has ``tile_rows``.
    """

    layers: TritonLayerShape
    configuration: MHAKernelConfig
    rows: int
    queries: int
    most: int
    target: int
    records: Tensor
    separate_merge: SeparateMerge | None
    partial_rows: int
    tile_rows: int

    @classmethod
    def reserve(
        cls,
        layers: TritonLayerShape,
        configuration: MHAKernelConfig,
        geometry: Geometry,
        multiprocessors: int,
        most_partial_rows: int = 0,
        sizes: BatchSizes | None = None,
    ) -> SplitKVSchedule:
        """Allocate. ``most_partial_rows`` limits ``partial_rows`` of splits at absolute positions. The merge is chosen
        by ``sizes``, or else by the batch's own."""
        group, tile, requests = layers.group, configuration.tile, geometry.requests
        uniform = geometry.new_lens is None
        if uniform:
            tiles = requests * -(-geometry.max_new * group // tile)
        else:
            tiles = geometry.rows * group // tile + min(requests, geometry.rows)
        target = max(configuration.programs * multiprocessors // layers.kv_heads, 1)
        records = torch.empty(tiles + target, RECORD_NUMBERS, dtype=torch.int32, device=geometry.device)
        queries = geometry.max_new if uniform else 0
        chosen_by = BatchSizes.of(geometry) if sizes is None else sizes
        config = _merge_config(layers, configuration, chosen_by, multiprocessors, target) if uniform else None
        merge = None
        if config is not None:
            numbers = SPLIT_TILE_NUMBERS if configuration.split else TILE_NUMBERS
            merge = SeparateMerge(torch.empty(tiles, numbers, dtype=torch.int32, device=geometry.device), config)
        tile_rows = tile if not configuration.split else min(tile, _power_of_two(chosen_by.new * group))
        if not configuration.split:
            partial_results = 2 * target  # a split tile has less than twice its share of splits
        elif uniform:
            cache_rows = _cache_rows(layers, configuration, BatchSizes.of(geometry).cache_rows)
            splits = max_splits(cache_rows, configuration.split, 0 if layers.window else SHORT_SPLITS.value)
            partial_results = min(min(tiles, target) * splits, max(most_partial_rows // tile_rows, 1))
        else:
            partial_results = 1
        partial_rows = partial_results * tile_rows
        most = geometry.max_new
        return cls(layers, configuration, geometry.rows, queries, most, target, records, merge, partial_rows, tile_rows)

    @property
    def merge_rows(self) -> int:
        """Rows of a tile that are merged at once: a power of two, at most as many as a request uses."""
        return min(_MERGED_ROWS, 1 << (self.most * self.layers.group - 1).bit_length())

    def fill(self, geometry: Geometry, slots: Tensor | None) -> None:
        """Fill from page table and lengths by one launch, without synchronization.

        Fills ``slots`` ``[rows]`` if given.
        """
        launch_plan(
            geometry.page_table,
            geometry.seq_lens,
            geometry.new_lens,
            slots,
            self.records,
            None if self.separate_merge is None else self.separate_merge.tiles,
            rows=self.rows,
            queries=self.queries,
            target=self.target,
            group=self.layers.group,
            tile=self.configuration.tile,
            step=self.configuration.step,
            window=self.layers.window,
            page_size=geometry.page_size,
            split=self.configuration.split,
            most_results=self.partial_rows // self.tile_rows,
        )


def _merge_config(
    layers: TritonLayerShape, configuration: MHAKernelConfig, sizes: BatchSizes, multiprocessors: int, target: int
) -> MergeConfig | None:
    """Return the configuration of the separate merge; ``None`` if a fused merge is faster.

    Splits at absolute positions are merged separately in every batch whose requests have equally many new tokens.
    """
    rows = sizes.requests * sizes.new * layers.kv_heads * layers.group
    if configuration.split:
        return split_merge_config(rows, layers.v_width)
    if not sizes.uniform:
        return None
    tiles = sizes.requests * -(-sizes.new * layers.group // configuration.tile)
    cache_rows = _cache_rows(layers, configuration, sizes.cache_rows)
    parts = max_parts(target, tiles, sizes.requests, -(-cache_rows // configuration.step))
    if not merges_separately(configuration, parts):
        return None
    return merge_config(parts, rows, layers.v_width, multiprocessors)


def _cache_rows(layers: TritonLayerShape, configuration: MHAKernelConfig, cache_rows: int) -> int:
    """Return the maximum cache rows of a tile, of the ``cache_rows`` that a request may have, by the window."""
    if not layers.window:
        return cache_rows
    queries = (configuration.tile + layers.group - 2) // layers.group
    return min(cache_rows, layers.window + queries + (configuration.split or configuration.step))


def max_split_rows(
    context: BackendContext, layers: TritonLayerShape, configuration: MHAKernelConfig, width: int
) -> int:
    """Return the rows of ``width`` columns to allocate for partial results of splits at absolute positions."""
    limits = context.limits
    splits = max_splits(limits.max_context, configuration.split, 0 if layers.window else SHORT_SPLITS.value)
    rows = min(configuration.tile, _power_of_two(_NEW_TOKENS * layers.group)) * layers.kv_heads
    return min(limits.max_requests * splits * rows, _SPLIT_BYTES // (4 * (2 + width)))
