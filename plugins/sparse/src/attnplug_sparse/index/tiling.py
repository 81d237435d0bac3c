"""Tile configurations of the score kernel, by the shape of a batch and the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """Tile sizes and launch parameters of the score kernel."""

    query_tile: int
    """New tokens of a request, with all their heads, that share one read of its keys."""
    key_tile: int
    """Keys that a program reads per step."""
    warps: int
    stages: int
    programs_per_sm: int = 1
    """The batch's work is divided evenly among all programs."""
    overlap: bool = False
    """Launch each kernel while the previous one still runs, and let it wait on the device (SM 90 and newer)."""
    converts_fp8: bool = True
    """The GPU has an instruction that converts e4m3 (SM 89 and newer)."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Compute capability, and bytes of shared memory per block."""

    sm: int
    shared_bytes: int


START_STEPS = 2
"""Cost of starting another tile, in steps of ``key_tile`` keys; counted only if lengths differ much."""
_ONE = ScoreConfig(1, 64, 4, 4, programs_per_sm=2)
CONFIGS = {1: _ONE, 2: replace(_ONE, query_tile=2, stages=3), 4: ScoreConfig(4, 128, 8, 3)}
"""Configurations by ``query_tile``."""
INVARIANT_QUERIES = 2
"""``queries`` of ``choose_tiles`` for all batches if levels of invariance beyond ``run`` are requested."""
_MAX_COLUMNS = 256
"""Largest number of heads of a tile, over all its tokens."""


def choose_tiles(queries: int, heads: int, dim: int, limits: DeviceLimits | None) -> ScoreConfig:
    """Return the configuration for ``queries`` new tokens per request (0 if they differ) and an index of ``heads`` ×
    ``dim``.

    The compiler needs shared memory for a tile's queries and for the keys of all stages, in 16 bits. ``limits`` is
    ``None`` if kernels are interpreted.
    """
    tile = max(size for size in CONFIGS if size <= (queries or 4) and (size == 1 or size * heads <= _MAX_COLUMNS))
    config = CONFIGS[tile]
    if limits is not None:
        config = replace(config, overlap=limits.sm >= 90, converts_fp8=limits.sm >= 89)
    while limits is not None and _shared_bytes(config, heads, dim) > limits.shared_bytes:
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.key_tile > 64:
            config = replace(config, key_tile=config.key_tile // 2)
        elif config.query_tile > 1:
            config = replace(config, query_tile=config.query_tile // 2)
        else:
            break
    return config


def _shared_bytes(config: ScoreConfig, heads: int, dim: int) -> int:
    return 2 * dim * (config.query_tile * heads + config.stages * config.key_tile) + 2048
