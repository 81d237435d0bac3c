"""Tile configurations of products with quantized weights, all in one place.

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
    """Tile of a product: rows of activations × rows of the matrix (gate and ``up`` together), warps, and iterations
    whose codes are copied ahead. An iteration has 128 columns, or ``units`` times 32 of 4-bit codes. ``lines`` cache
    lines of each row of the matrix, a power of two, are requested before the kernel waits for its input."""

    rows: int
    columns: int
    warps: int
    stages: int
    units: int = 4
    lines: int = 0

    def stage(self, form: str) -> int:
        """Bytes of shared memory of an iteration."""
        step = 128 if form in ("scaled", "fp8") else 32 * self.units
        sizes = {"scaled": (1.0, 1.0), "fp8": (2.0, 1.0)}.get(form, (2.0, 0.5))
        return int(step * (self.rows * sizes[0] + self.columns * sizes[1])) + 4 * (self.rows + self.columns)


Table = tuple[tuple[int, int, QuantizedConfig], ...]
"""Most rows, most rows of the matrix, and their configuration. The first that fits applies."""
ANY = 1 << 62
SHORT = 4096
"""Rows of a matrix that has too few tiles of 64 rows for all multiprocessors. Its programs are few, so each has more
codes in flight: an H200 needs about 4 MB."""

_PACKED: Table = (
    (8, ANY, QuantizedConfig(8, 32, 2, 4, units=8)),
    (16, ANY, QuantizedConfig(16, 32, 2, 4, units=8)),
    (32, ANY, QuantizedConfig(32, 32, 2, 4)),
    (ANY, ANY, QuantizedConfig(64, 32, 2, 4)),
)
"""4-bit codes need tiles of 32 rows and two warps: Triton then decodes them in the layout of the tensor cores, and
otherwise moves decoded ones through shared memory."""
CONFIGS: Mapping[str, Table] = {
    "scaled": (
        (8, SHORT, QuantizedConfig(8, 32, 2, 20, lines=16)),
        (8, ANY, QuantizedConfig(8, 64, 4, 10)),
        (16, SHORT, QuantizedConfig(16, 32, 2, 20, lines=16)),
        (16, ANY, QuantizedConfig(16, 64, 4, 10)),
        (32, ANY, QuantizedConfig(32, 64, 4, 8)),
        (64, ANY, QuantizedConfig(64, 64, 4, 6)),
        (128, ANY, QuantizedConfig(64, 128, 4, 5)),
        (ANY, ANY, QuantizedConfig(128, 128, 8, 4)),
    ),
    "fp8": ((16, ANY, QuantizedConfig(16, 64, 4, 6)), (ANY, ANY, QuantizedConfig(64, 64, 4, 3))),
    "int4": _PACKED,
    "mxfp4": _PACKED,
}
"""Tables by format (``quantized_tiles``)."""
EXPERTS: Mapping[str, Table] = {
    "scaled": (
        (1, ANY, QuantizedConfig(8, 64, 4, 8)),
        (16, ANY, QuantizedConfig(16, 64, 4, 6)),
        (64, ANY, QuantizedConfig(64, 64, 4, 5)),
        (ANY, ANY, QuantizedConfig(128, 128, 8, 3)),
    ),
    "fp8": ((16, ANY, QuantizedConfig(16, 64, 4, 3)), (ANY, ANY, QuantizedConfig(64, 64, 4, 3))),
    "int4": _PACKED,
    "mxfp4": _PACKED,
}
"""The same for experts, by the mean number of pairs of an expert; the matrix rows do not matter."""
_RESERVED = 2048


@cache
def choose(form: str, rows: int, columns: int, device: torch.device) -> QuantizedConfig:
    """Return the configuration for ``rows`` of activations and a matrix of ``columns`` rows."""
    return fitting(_first(CONFIGS[form], rows, columns), form, device)


@cache
def choose_experts(form: str, pairs: int, experts: int, device: torch.device) -> QuantizedConfig:
    """Return the configuration for ``pairs`` of tokens and experts."""
    return fitting(_first(EXPERTS[form], -(-pairs // experts), 0), form, device)


def _first(table: Table, rows: int, columns: int) -> QuantizedConfig:
    return next(config for most, widest, config in table if rows <= most and columns <= widest)


def fitting(config: QuantizedConfig, form: str, device: torch.device) -> QuantizedConfig:
    """Return a configuration with as many of its stages as the device's shared memory holds."""
    most = (shared_memory(device) - _RESERVED) // config.stage(form)
    return replace(config, stages=max(min(config.stages, most), 2))
