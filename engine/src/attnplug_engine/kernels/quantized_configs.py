"""Tile configurations of GEMMs with quantized weights.

``benchmarks/quantized_products_h200.py`` times them and others on an H200, by shape and number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from attnplug_engine.kernels import shared_memory


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """Tile sizes and launch parameters of a product ``[rows, columns]``."""

    rows: int
    """Rows of activations per tile."""
    columns: int
    """Rows of the weight matrix per tile, gate and up together."""
    warps: int
    stages: int
    """Pipeline stages: iterations over K whose codes are copied ahead. An iteration has 128 columns of fp8 codes."""
    units: int = 4
    """Blocks of 32 columns per iteration over 4-bit codes."""
    lines: int = 0
    """Cache lines of each matrix row that are prefetched before the kernel waits for its input: a power of two."""

    def stage_bytes(self, form: str) -> int:
        """Return the shared memory of one stage."""
        step = 128 if form in ("scaled", "fp8") else 32 * self.units
        sizes = {"scaled": (1.0, 1.0), "fp8": (2.0, 1.0)}.get(form, (2.0, 0.5))
        return int(step * (self.rows * sizes[0] + self.columns * sizes[1])) + 4 * (self.rows + self.columns)


Table = tuple[tuple[int, int, QuantizedConfig], ...]
"""Entries: maximum activation rows, maximum matrix rows, configuration. The first match applies."""
ANY = 1 << 62
SHORT = 4096
"""Maximum rows of a matrix that has too few tiles of 64 rows to fill all SMs. Each program then keeps more codes in
flight: an H200 needs about 4 MB in flight."""

_PACKED: Table = (
    (8, ANY, QuantizedConfig(8, 32, 2, 4, units=8)),
    (16, ANY, QuantizedConfig(16, 32, 2, 4, units=8)),
    (32, ANY, QuantizedConfig(32, 32, 2, 4)),
    (ANY, ANY, QuantizedConfig(64, 32, 2, 4)),
)
"""4-bit codes use tiles of 32 rows and two warps: Triton then decodes them in the tensor cores' operand layout. With
other tiles it moves decoded values through shared memory."""
CONFIGS: Mapping[str, Table] = {
    "scaled": (
        (8, SHORT, QuantizedConfig(8, 32, 2, 20, lines=16)),
        (8, ANY, QuantizedConfig(8, 64, 4, 6)),
        (16, SHORT, QuantizedConfig(16, 32, 2, 20, lines=16)),
        (16, ANY, QuantizedConfig(16, 64, 4, 6)),
        (32, ANY, QuantizedConfig(32, 64, 4, 6)),
        (64, ANY, QuantizedConfig(64, 64, 4, 4)),
        (256, ANY, QuantizedConfig(64, 128, 4, 4)),
        (ANY, ANY, QuantizedConfig(128, 128, 8, 4)),
    ),
    "fp8": ((16, ANY, QuantizedConfig(16, 64, 4, 6)), (ANY, ANY, QuantizedConfig(64, 64, 4, 3))),
    "int4": _PACKED,
    "mxfp4": _PACKED,
}
"""Tables by format (``quantized_tiles``)."""
EXPERTS: Mapping[str, Table] = {
    "scaled": (
        (1, ANY, QuantizedConfig(8, 64, 4, 6)),
        (16, ANY, QuantizedConfig(16, 64, 4, 6)),
        (64, ANY, QuantizedConfig(64, 64, 4, 5)),
        (ANY, ANY, QuantizedConfig(128, 128, 8, 3)),
    ),
    "fp8": ((16, ANY, QuantizedConfig(16, 64, 4, 3)), (ANY, ANY, QuantizedConfig(64, 64, 4, 3))),
    "int4": _PACKED,
    "mxfp4": _PACKED,
}
"""Tables of routed experts. Rows are the mean number of (token, expert) pairs per expert; matrix rows are not used."""
_RESERVED = 2048
"""Bytes of shared memory that are not available to stages."""


@cache
def choose(form: str, rows: int, columns: int, device: torch.device) -> QuantizedConfig:
    """Return the configuration for ``rows`` rows of activations and a matrix with ``columns`` rows."""
    return fitting(_lookup(CONFIGS[form], rows, columns), form, device)


@cache
def choose_experts(form: str, pairs: int, experts: int, device: torch.device) -> QuantizedConfig:
    """Return the configuration for ``pairs`` (token, expert) pairs over ``experts`` experts."""
    return fitting(_lookup(EXPERTS[form], -(-pairs // experts), 0), form, device)


def _lookup(table: Table, rows: int, columns: int) -> QuantizedConfig:
    return next(config for most, widest, config in table if rows <= most and columns <= widest)


def fitting(config: QuantizedConfig, form: str, device: torch.device) -> QuantizedConfig:
    """Return the configuration with as many stages as fit into the device's shared memory, at least 2."""
    most = (shared_memory(device) - _RESERVED) // config.stage_bytes(form)
    return replace(config, stages=max(min(config.stages, most), 2))
