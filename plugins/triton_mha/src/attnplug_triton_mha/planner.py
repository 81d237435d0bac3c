"""Lengths and page table → what the kernel reads: a batch's schedule, made on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry, LayerSpec
from attnplug_triton_mha.configurations import Configuration, MergeCut, merge_cut, merged_apart, most_parts
from attnplug_triton_mha.triton_plan import RECORD_NUMBERS, TILE_NUMBERS, launch_plan

_MERGED_ROWS = 16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a schedule knows of the layers that it serves. Layers of one shape share it."""

    kv_heads: int
    group: int
    """Query heads of each KV head."""
    dim: int
    v_dim: int
    window: int
    """0 without one."""

    @classmethod
    def of(cls, layer: LayerSpec) -> LayerShape:
        group = layer.num_heads // layer.num_kv_heads
        return cls(layer.num_kv_heads, group, layer.head_dim, layer.v_head_dim, layer.sliding_window or 0)

    @property
    def width(self) -> int:
        """Columns of a key, padded for tensor cores."""
        return padded(self.dim)

    @property
    def v_width(self) -> int:
        return padded(self.v_dim)


def padded(width: int) -> int:
    """The next power of two: what a kernel's tensors have as sizes. Tensor cores take 16 columns, of fp8 rows twice."""
    return max(32, 1 << (width - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """What a separate kernel merges by: ``tiles`` ``[requests * tiles of each, TILE_NUMBERS]`` int32, made by
    ``Schedule.fill``, and how the kernel is cut."""

    tiles: Tensor
    cut: MergeCut


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """How a batch is divided for layers of one shape: ``records`` ``[programs, RECORD_NUMBERS]`` int32, made by
    ``fill``.

    ``rows`` are the query rows of the batch, ``queries`` the new tokens of every request or 0 if they differ, ``most``
    the most that one has. ``target`` programs per KV head share the work. Without ``apart``, parts are merged where
    they are made.
    """

    layers: LayerShape
    configuration: Configuration
    rows: int
    queries: int
    most: int
    target: int
    records: Tensor
    apart: Apart | None

    @classmethod
    def reserve(
        cls, layers: LayerShape, configuration: Configuration, geometry: Geometry, multiprocessors: int
    ) -> Schedule:
        group, tile, requests = layers.group, configuration.tile, geometry.requests
        uniform = geometry.new_lens is None
        if uniform:
            tiles = requests * -(-geometry.max_new * group // tile)
        else:
            tiles = geometry.rows * group // tile + min(requests, geometry.rows)
        target = max(configuration.programs * multiprocessors // layers.kv_heads, 1)
        records = torch.empty(tiles + target, RECORD_NUMBERS, dtype=torch.int32, device=geometry.device)
        queries = geometry.max_new if uniform else 0
        apart = cls._apart(layers, configuration, geometry, multiprocessors, tiles, target) if uniform else None
        return cls(layers, configuration, geometry.rows, queries, geometry.max_new, target, records, apart)

    @staticmethod
    def _apart(
        layers: LayerShape,
        configuration: Configuration,
        geometry: Geometry,
        multiprocessors: int,
        tiles: int,
        target: int,
    ) -> Apart | None:
        """For a batch of equally many new tokens, by its shape and by the room in its page table."""
        tile, step = configuration.tile, configuration.step
        cache_rows = geometry.page_table.shape[1] * geometry.page_size
        if layers.window:
            queries = (tile + layers.group - 2) // layers.group
            cache_rows = min(cache_rows, layers.window + queries + step)
        parts = most_parts(target, tiles, geometry.requests, -(-cache_rows // step))
        if not merged_apart(configuration, parts):
            return None
        cut = merge_cut(parts, geometry.rows * layers.kv_heads * layers.group, layers.v_width, multiprocessors)
        return Apart(torch.empty(tiles, TILE_NUMBERS, dtype=torch.int32, device=geometry.device), cut)

    @property
    def partial_rows(self) -> int:
        """The most rows of partial results of one KV head: a divided tile has less than twice its share of parts."""
        return 2 * self.target * self.configuration.tile

    @property
    def merge_rows(self) -> int:
        """Rows of a tile that are merged at once: a power of two, not more than any request uses."""
        return min(_MERGED_ROWS, 1 << (self.most * self.layers.group - 1).bit_length())

    def fill(self, geometry: Geometry, slots: Tensor | None) -> None:
        """From page table and lengths, by one launch that waits for nothing; ``slots`` ``[rows]`` too if given."""
        launch_plan(
            geometry.page_table,
            geometry.seq_lens,
            geometry.new_lens,
            slots,
            self.records,
            None if self.apart is None else self.apart.tiles,
            rows=self.rows,
            queries=self.queries,
            target=self.target,
            group=self.layers.group,
            tile=self.configuration.tile,
            step=self.configuration.step,
            window=self.layers.window,
            page_size=geometry.page_size,
        )
