"""What the kernels are planned with: the shape of a layer, and how FlashInfer cuts its query rows into tiles."""

from __future__ import annotations

from dataclasses import dataclass

from attnplug import LayerSpec

_SLACK = 1 << 20
"""Bytes beside the parts of divided requests, for alignment."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a plan knows of the layers that it serves. Layers of one shape share it."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    """Keys that a query sees, itself included."""
    cap: float | None

    @classmethod
    def of(cls, layer: LayerSpec) -> LayerShape:
        return cls(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.sliding_window, layer.logit_cap
        )

    @property
    def group(self) -> int:
        """Query heads of each KV head. A query's heads of one group are rows of the same tile."""
        return self.heads // self.kv_heads

    @property
    def window_left(self) -> int:
        """Keys before a query's own that it sees, as FlashInfer counts; -1 for all."""
        return -1 if self.window is None else self.window - 1

    def tile_rows(self, rows: int) -> int:
        """Rows of a tile, if requests have so many: queries times group."""
        if rows > 64 and self.dim < 256:
            return 128
        return 64 if rows > 16 else 16

    def eager_scratch(self, processors: int) -> int:
        """Bytes for the parts of any batch: it is divided only while its tiles are fewer than the GPU holds."""
        return self._scratch(self._at_once(processors), self.tile_rows(1 << 30))

    def captured_scratch(self, processors: int, requests: int, queries: int) -> int:
        """Bytes for a captured batch, all of whose tiles are parts. Of a decode FlashInfer takes tiles to be ragged."""
        tile = self.tile_rows(queries * self.group)
        if queries == 1:
            tiles = -(-requests * self.group // tile) + requests - 1
        else:
            tiles = requests * -(-queries * self.group // tile)
        return self._scratch(max(self._at_once(processors), tiles), tile)

    def _at_once(self, processors: int) -> int:
        return 2 * processors // self.kv_heads

    def _scratch(self, tiles: int, tile: int) -> int:
        return 4 * self.heads * tiles * tile * (self.dim + 1) + _SLACK
