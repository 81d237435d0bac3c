"""Sizes of HiSparse's device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Rows per request."""
    buffer_size: int
    """Rows per hot buffer."""
    nodes: int = 1
    """Largest number of new rows for which a request is served from its hot buffer, usually that of a verify. A request
    with more is a prefill: its whole context is copied to the device, one layer at a time."""

    def check(self, layers: Sequence[LayerSpec]) -> None:
        """Raise UsageError for layers that these buffers cannot serve."""
        for layer in layers:
            if layer.mla is None or layer.indexer is None:
                raise UsageError(
                    f"`enable_hisparse` keeps the rows that sparse layers select from outside the device, and layer "
                    f"{layer.layer_id} attends to all rows; leave it out",
                    settings=["enable_hisparse"],
                )
        topk = max(layer.indexer.topk for layer in layers if layer.indexer is not None)
        needed = topk * self.nodes
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
        tables = buffers * (self.buffer_size * (4 + 2) + self.max_context * 2)
        lists = self.max_requests * (self.buffer_size * 9 + 8)
        return rows * row_nbytes + tables + lists
