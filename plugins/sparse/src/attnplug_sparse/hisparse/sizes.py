"""How much memory HiSparse takes, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnplug import LayerSpec
from attnplug.kernels import UsageError

MOST_COLUMNS = 32767
"""Rows of a hot buffer: a column is kept as int16."""


@dataclass(frozen=True, slots=True)
class HotSizes:
    """What the memory on the device is made for."""

    max_requests: int
    """Rows of the slot table: each has a hot buffer in every layer."""
    max_tokens: int
    """New rows of one step, padding included."""
    max_context: int
    """Rows of one request."""
    buffer_size: int
    """Rows of a hot buffer."""
    nodes: int = 1
    """New rows of a request up to which it is served from its hot buffer; those of a verify, mostly. A request with
    more is prefilled: its whole context is copied to the device, one layer at a time."""

    def check(self, layers: Sequence[LayerSpec]) -> None:
        """Refuse layers that these buffers cannot serve. Raises UsageError."""
        for layer in layers:
            if layer.mla is None or layer.indexer is None:
                raise UsageError(
                    f"`enable_hisparse` keeps rows outside of the device that sparse layers choose from, and layer "
                    f"{layer.layer_id} attends to all rows; leave it out",
                    settings=["enable_hisparse"],
                )
        topk = max(layer.indexer.topk for layer in layers if layer.indexer is not None)
        needed = topk * self.nodes
        if self.buffer_size < needed:
            rows = f" for each of {self.nodes} rows that are verified at once" if self.nodes > 1 else ""
            raise UsageError(
                f"`hisparse_config` has a device_buffer_size of {self.buffer_size}, and the model's index chooses "
                f"{topk} rows{rows}; give {needed} or more",
                settings=["hisparse_config"],
            )
        if self.buffer_size > MOST_COLUMNS:
            raise UsageError(
                f"`hisparse_config` has a device_buffer_size of {self.buffer_size}; give {needed} to {MOST_COLUMNS}",
                settings=["hisparse_config"],
            )
        if len({layer.mla.row_dim for layer in layers if layer.mla is not None}) > 1:
            raise UsageError(
                "`enable_hisparse` needs latent rows of one width, and the model's layers differ; leave it out",
                settings=["enable_hisparse"],
            )

    def device_nbytes(self, layers: int, row_nbytes: int) -> int:
        """Bytes on the device, apart from the place for a layer's row at every slot of the page table."""
        buffers = layers * self.max_requests
        rows = buffers * self.buffer_size + self.max_tokens
        tables = buffers * (self.buffer_size * (4 + 2) + self.max_context * 2)
        lists = self.max_requests * (self.buffer_size * 9 + 8)
        return rows * row_nbytes + tables + lists
