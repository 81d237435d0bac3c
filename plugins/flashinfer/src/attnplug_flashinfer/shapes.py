"""Layer shape that kernels are planned with, and FlashInfer's tile and scratch sizes for it."""

from __future__ import annotations

from dataclasses import dataclass

from attnplug import LayerSpec

_SLACK = 1 << 20
"""Bytes in addition to partial results, for alignment."""


@dataclass(frozen=True, slots=True)
class FlashInferLayerShape:
    """Attention parameters of a layer. Layers of the same shape share planned kernels."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    """Sliding window in keys, including the query's own."""
    cap: float | None

    @classmethod
    def of(cls, layer: LayerSpec) -> FlashInferLayerShape:
        return cls(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.sliding_window, layer.logit_cap
        )

    @property
    def group(self) -> int:
        """Query heads per KV head. The heads of a group are rows of the same tile."""
        return self.heads // self.kv_heads

    @property
    def window_left(self) -> int:
        """Visible keys before the query's own, as FlashInfer counts; -1 for all."""
        return -1 if self.window is None else self.window - 1

    def tile_rows(self, rows: int) -> int:
        """Return FlashInfer's tile height for requests of ``rows`` rows (queries × group)."""
        if rows > 64 and self.dim < 256:
            return 128
        return 64 if rows > 16 else 16

    def eager_scratch(self, processors: int) -> int:
        """Return scratch bytes for any eager batch. FlashInfer splits KV only if the tiles do not fill the GPU."""
        return self._scratch(self._concurrent_tiles(processors), self.tile_rows(1 << 30))

    def captured_scratch(self, processors: int, requests: int, queries: int) -> int:
        """Return scratch bytes for a captured batch, in which all tiles are split.

        FlashInfer sizes decode as ragged.
        """
        tile = self.tile_rows(queries * self.group)
        if queries == 1:
            tiles = -(-requests * self.group // tile) + requests - 1
        else:
            tiles = requests * -(-queries * self.group // tile)
        return self._scratch(max(self._concurrent_tiles(processors), tiles), tile)

    def _concurrent_tiles(self, processors: int) -> int:
        return 2 * processors // self.kv_heads

    def _scratch(self, tiles: int, tile: int) -> int:
        return 4 * self.heads * tiles * tile * (self.dim + 1) + _SLACK
