"""Sizes of HiSparse's device memory: of latent rows, and of the entries of compressed layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnplug import LayerSpec, UsageError

MAX_COLUMNS = 32767
"""Largest hot buffer, in rows: columns are stored as int16."""


@dataclass(frozen=True, slots=True)
class HotSizes:
    """Limits for which device memory is allocated."""

    max_requests: int
    """Rows of the slot table. Each has one hot buffer per layer."""
    max_tokens: int
    """New rows per step, padding included."""
    max_context: int
    """Tokens per request."""
    buffer_size: int
    """Rows per hot buffer."""
    nodes: int = 1
    """Largest number of new rows for which a request is served from its hot buffer, usually that of a verify. A request
    with more is a prefill: its whole context is copied to the device, one layer at a time."""
    ratio: int = 1
    """Tokens per row: 1 for latent rows, more for compressed entries."""
    window: int | None = None
    """Newest rows of a request that a layer reads, if they are those of a sliding window."""

    @property
    def max_positions(self) -> int:
        """Rows per request."""
        return self.max_context // self.ratio

    def check(self, layers: Sequence[LayerSpec]) -> None:
        """Raise UsageError for layers that these buffers cannot serve."""
        for layer in layers:
            if layer.mla is None or (layer.indexer is None and self.window is None):
                raise UsageError(
                    f"`enable_hisparse` keeps the rows that sparse layers select from outside the device, and layer "
                    f"{layer.layer_id} attends to all rows; leave it out",
                    settings=["enable_hisparse"],
                )
        topk = max((layer.indexer.topk for layer in layers if layer.indexer is not None), default=0)
        needed = topk * self.nodes if self.window is None else self.window
        if self.buffer_size < needed:
            rows = f" for each of {self.nodes} rows that are verified together" if self.nodes > 1 else ""
            raise UsageError(
                f"`hisparse_config` has a device_buffer_size of {self.buffer_size}, and the model's index selects "
                f"{topk} rows{rows}; give {needed} or more",
                settings=["hisparse_config"],
            )
        if self.buffer_size > MAX_COLUMNS:
            raise UsageError(
                f"`hisparse_config` has a device_buffer_size of {self.buffer_size}; give {needed} to {MAX_COLUMNS}",
                settings=["hisparse_config"],
            )
        if len({layer.mla.row_dim for layer in layers if layer.mla is not None}) > 1:
            raise UsageError(
                "`enable_hisparse` needs latent rows of one width, and the model's layers differ; leave it out",
                settings=["enable_hisparse"],
            )

    def device_nbytes(self, layers: int, row_nbytes: int) -> int:
        """Return the bytes on the device, without the staging area (one layer's row per slot of the page table)."""
        buffers = layers * self.max_requests
        rows = buffers * self.buffer_size + self.max_tokens
        tables = buffers * (self.buffer_size * (4 + 2) + self.max_positions * 2)
        lists = self.max_requests * (self.buffer_size * 9 + 8)
        return rows * row_nbytes + tables + lists


@dataclass(frozen=True, slots=True)
class HotLayers:
    """Layers whose rows, or entries, are in one ``HotPool``, and its sizes."""

    layers: tuple[LayerSpec, ...]
    sizes: HotSizes

    def rows_per_page(self, page_size: int) -> int:
        return page_size // self.sizes.ratio


def rows_and_entries(layers: Sequence[LayerSpec], sizes: HotSizes) -> tuple[HotLayers, HotLayers | None]:
    """Return the layers with latent rows in host memory, and those with entries there, ``None`` if there are none.

    ``sizes`` are those of what an index selects. All layers of a model with compressed layers read the latent rows of a
    sliding window. Entries that an index selects are in host memory. Layers that read all entries have them on the
    device.
    """
    if not any(layer.compressed for layer in layers):
        return HotLayers(tuple(layers), sizes), None
    window = max(layer.sliding_window or 0 for layer in layers)
    rows = HotLayers(tuple(layers), replace(sizes, buffer_size=window, window=window))
    chosen = tuple(layer for layer in layers if layer.compressed is not None and layer.indexer is not None)
    ratios = {layer.compressed.ratio for layer in chosen if layer.compressed is not None}
    if len(ratios) > 1:
        raise UsageError(
            f"`enable_hisparse` needs entries of equally many tokens, and the model's layers have {sorted(ratios)}; "
            "leave it out",
            settings=["enable_hisparse"],
        )
    return rows, HotLayers(chosen, replace(sizes, ratio=ratios.pop())) if chosen else None
