"""Kernel configurations by batch shape: a table per row format, and the adjustment to a GPU's shared memory.

A shape is the number of (query token, head) rows per request, the number of requests, and the capacity of the page
table. Lengths are not part of it: they are known on the device only, a captured graph serves any, and the schedule
adapts to them. ``benchmarks/tune_triton_mla.py`` measures candidates for every shape over several lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kernel = Literal["triton", "low", "wide"]
"""``triton_attention``, ``gluon_low`` (tiles of 16 rows) or ``gluon_wide`` (tiles of 64 rows)."""
RowFormat = Literal["plain", "fp8", "fp8_per_token_head", "fp8_ds_mla", "nvfp4"]
"""Names of KV formats in the Triton kernel: 16-bit values, e4m3 with one scale per layer, and others by name."""
Merge = Literal["last", "kernel"]


@dataclass(frozen=True, slots=True)
class MLAKernelConfig:
    """Kernel, tile sizes and launch parameters of attention and merge."""

    tile: int
    """(query token, head) rows per tile."""
    step: int
    """Cache rows per loop iteration: 32 or 64."""
    warps: int
    stages: int
    kernel: Kernel = "triton"
    """``triton_attention`` with tiles of 16 or 32; or one for SM 90 and 16-bit caches: ``gluon_low`` with tiles of 16,
    or ``gluon_wide`` with tiles of 64, steps of 64, 8 warps and 2 stages."""
    programs: int = 1
    """Programs per multiprocessor. All of a batch's work is divided evenly among them."""
    start_steps: int = 2
    """Cost of starting another tile, in steps; used only if lengths differ much."""
    least_steps: int = 1
    """Minimum steps of a program that has work. With little work, some programs have none."""
    part_cost: float = 0.0
    """Cost of merging another split, in steps. If it is above 0, long requests have fewer splits."""
    merge: Merge = "kernel"
    """Merge of a tile's KV splits: by the program that finishes ``last`` (Triton kernel only), or by a separate
    ``kernel``, which requires the same number of rows in every request."""
    merge_parts: int = 64
    """Splits per load of the merge kernel."""
    merge_columns: int = 64
    """Columns per program of the merge."""
    merge_warps: int = 4
    overlap: bool = False
    """Use programmatic dependent launch (SM 90 and newer)."""
    registers: int | None = None
    """Maximum registers per thread of the Triton kernel, so that several programs fit a multiprocessor."""
    split: int = 0
    """Rows of the shortest KV split at absolute positions (``triton_splits``); 0 splits by the work of the batch."""
    grows: bool = False
    """Splits get longer with their position."""

    def __post_init__(self) -> None:
        if self.merge == "last" and self.kernel != "triton":
            raise ValueError(f"kernel {self.kernel!r} leaves splits to a merge kernel; merge='last' requires 'triton'")


ANY = 1 << 30  # no limit

Table = tuple[tuple[int, int, int, MLAKernelConfig], ...]
"""Entries: maximum (query token, head) rows per request, maximum requests, maximum cache rows per request, and the
configuration. The first match applies."""

# Chosen from benchmarks/results/triton_mla_cuts_h200.json. Few short requests with many rows use tiles of 16: more
# programs share the work, and each reads less before it starts.
_LOW = MLAKernelConfig(16, 32, 4, 3, "low", merge_parts=16, merge_columns=512, overlap=True)
_LOW_SOME = replace(_LOW, merge_parts=16, merge_columns=256, merge_warps=2)
_LOW_FEW = replace(_LOW, merge_parts=128, merge_columns=32, merge_warps=2)
_LOW_MANY = MLAKernelConfig(16, 64, 4, 3, merge_parts=16, merge_columns=512, overlap=True)
_WIDE = MLAKernelConfig(64, 64, 8, 2, "wide", merge_parts=16, merge_columns=512, overlap=True)
_WIDE_SOME = replace(_WIDE, merge_parts=32, merge_columns=64, merge_warps=1)
_WIDE_FEW = replace(_WIDE, merge_parts=64, merge_columns=64, merge_warps=2, part_cost=1 / 16)
TABLE: Table = (
    (16, 2, ANY, _LOW_FEW),
    (16, 8, ANY, _LOW_SOME),
    (16, 32, ANY, _LOW),
    (16, ANY, ANY, _LOW_MANY),
    (32, 2, ANY, _LOW_FEW),
    (32, 8, 8192, _LOW_SOME),
    (ANY, 1, 8192, _LOW_SOME),
    (ANY, 1, ANY, _WIDE_FEW),
    (64, 8, ANY, _WIDE_SOME),
    (ANY, 2, ANY, _WIDE_SOME),
    (ANY, ANY, ANY, _WIDE),
)
_FP8 = MLAKernelConfig(16, 64, 4, 4, merge_parts=16, merge_columns=512, overlap=True)
_FP8_MANY = replace(_FP8, stages=3, programs=2)
TABLE_FP8: Table = (
    (16, 2, ANY, replace(_FP8, merge_parts=128, merge_columns=32, merge_warps=1)),
    (16, 8, ANY, replace(_FP8, merge_parts=32, merge_columns=64, merge_warps=1)),
    (16, 32, ANY, _FP8),
    (ANY, 2, ANY, replace(_FP8_MANY, merge_parts=32, merge_columns=64, merge_warps=1)),
    (ANY, ANY, ANY, _FP8_MANY),
)
_TALL = MLAKernelConfig(32, 64, 8, 3, merge_parts=16, merge_columns=512, overlap=True)
# Not measured yet. 16 warps per multiprocessor instead of 8: instructions, not bytes, limit a decode of 8-bit rows.
# Tiles of 32 convert a row half as often, which is where most instructions are.
_TOKEN_SCALES_MANY = replace(_FP8_MANY, warps=8, registers=128)
TABLE_FP8_PER_TOKEN_HEAD: Table = (
    *TABLE_FP8[:2],
    (16, 32, 8192, _FP8),  # two programs per multiprocessor are faster from 16 x 16384 tokens on
    (16, ANY, ANY, _TOKEN_SCALES_MANY),
    (ANY, 2, ANY, replace(_TOKEN_SCALES_MANY, merge_parts=32, merge_columns=64, merge_warps=1)),
    (ANY, ANY, ANY, _TALL),
)
# Rows are converted once, through shared memory: a step of 64 takes 64 KiB, so two programs have two stages each.
_NVFP4 = MLAKernelConfig(16, 64, 4, 3, merge_parts=16, merge_columns=512, overlap=True)
_NVFP4_MANY = replace(_NVFP4, stages=2, programs=2)
TABLE_NVFP4: Table = (
    (16, 2, ANY, replace(_NVFP4, merge_parts=128, merge_columns=32, merge_warps=1)),
    (16, 8, ANY, replace(_NVFP4, merge_parts=32, merge_columns=64, merge_warps=1)),
    (16, 32, 8192, _NVFP4),
    (16, ANY, ANY, _NVFP4_MANY),
    (ANY, 2, ANY, replace(_NVFP4_MANY, merge_parts=32, merge_columns=64, merge_warps=1)),
    (ANY, ANY, ANY, _TALL),
)
TABLES: dict[RowFormat, Table] = {
    "plain": TABLE,
    "fp8": TABLE_FP8,
    "fp8_per_token_head": TABLE_FP8_PER_TOKEN_HEAD,
    "fp8_ds_mla": TABLE_NVFP4,  # not measured; rows are converted to 16 bits once, as those of nvfp4
    "nvfp4": TABLE_NVFP4,
}
RAGGED = replace(_TALL, merge="last", merge_columns=128, part_cost=0.25)
"""Configuration of batches whose requests have different numbers of rows, as in a prefill."""
ENTRIES = (RAGGED, *(entry for table in TABLES.values() for *_, entry in table))

INVARIANT = replace(_LOW_MANY, split=128, grows=True), replace(_TALL, split=128, grows=True)
"""Configurations of models with few heads if levels of invariance beyond ``run`` are requested, the smallest tiles
first. Bits do not depend on the tile: both multiply by mma.sync, whose rows are independent."""
INVARIANT_WIDE = (replace(_WIDE, split=512),)
"""The same for models with many heads. A program that continues a tile adds up its splits in L2, which reads and writes
256 KiB per split, so splits are long."""
_INVARIANT_HEADS = 32
"""Maximum heads of ``INVARIANT``: a tile has all of a token's."""


def choose(rows: int, requests: int, tokens: int, *, format: RowFormat) -> MLAKernelConfig:
    """Return the configuration for ``requests`` requests with ``rows`` (query token, head) rows and up to ``tokens``
    each. ``rows`` is 0 if requests differ.
    """
    if not rows:
        return RAGGED
    asked, table = (rows, requests, tokens), TABLES[format]
    return next(entry for *limits, entry in table if all(x <= most for x, most in zip(asked, limits, strict=True)))


def choose_invariant(heads: int, format: RowFormat) -> tuple[MLAKernelConfig, ...]:
    """Return the configurations of a model, by tile, if levels of invariance beyond ``run`` are requested."""
    return INVARIANT if heads <= _INVARIANT_HEADS or format != "plain" else INVARIANT_WIDE


def on_triton(configuration: MLAKernelConfig) -> MLAKernelConfig:
    """Return the equivalent configuration of the Triton kernel, which supports every GPU, every cache and trees."""
    if configuration.kernel == "triton":
        return configuration
    tile = _TALL.tile if configuration.kernel == "wide" else configuration.tile
    if configuration.split:
        return INVARIANT[-1]
    return replace(configuration, kernel="triton", tile=tile, step=_TALL.step, stages=_TALL.stages)


def max_partial_rows(multiprocessors: int) -> int:
    """Return the maximum rows of partial results of any table entry."""
    return max(2 * entry.programs * multiprocessors * entry.tile for entry in ENTRIES)


@dataclass(frozen=True, slots=True)
class MLAKernelLimits:
    """Limits of a configuration: SM version, shared memory per program, bytes per query row and per cache row.

    ``copied``: cache rows are aligned for the Gluon kernels' asynchronous copies. ``converted_bytes``: shared memory
    per row of a step for its converted values; 0 if they are not converted.
    """

    sm: int
    shared_bytes: int
    query_bytes: int
    row_bytes: int
    copied: bool = True
    converted_bytes: int = 0


def fit_config(configuration: MLAKernelConfig, limits: MLAKernelLimits) -> MLAKernelConfig:
    """Return ``configuration``, with fewer stages, shorter steps or smaller tiles if it exceeds the limits."""
    fits = configuration
    runs_gluon = limits.sm == 90 and limits.copied and _shared_bytes(fits, limits) <= limits.shared_bytes
    if not runs_gluon:
        fits = on_triton(fits)
    if limits.sm < 90:
        fits = replace(fits, overlap=False)
    while _shared_bytes(fits, limits) > limits.shared_bytes:
        if fits.stages > 2:
            fits = replace(fits, stages=fits.stages - 1)
        elif fits.step > 32:
            fits = replace(fits, step=fits.step // 2)
        elif fits.tile > 16:
            fits = replace(fits, tile=fits.tile // 2)
        elif fits.stages > 1:
            fits = replace(fits, stages=1)
        else:
            break
    return fits


def fit_invariant(
    configurations: tuple[MLAKernelConfig, ...], limits: MLAKernelLimits | None
) -> tuple[MLAKernelConfig, ...]:
    """Return the configurations as ``fit_config`` does. Those that cannot have the steps of the last are left out."""
    if limits is None:
        return configurations
    last = fit_config(configurations[-1], limits)
    fits = [fit_config(replace(each, step=last.step), limits) for each in configurations[:-1]]
    return *(each for each in fits if each.step == last.step), last


def _shared_bytes(configuration: MLAKernelConfig, limits: MLAKernelLimits) -> int:
    """Return the compiler's shared memory: queries, weights, and cache rows of all stages but the one being loaded.

    Gluon kernels keep the rows of all stages. Instead of weights, ``gluon_low`` keeps four copies of the logits;
    ``gluon_wide`` needs some bytes more to find the largest logit. For fp8 rows Triton 3.8 also keeps half a step of
    converted rows; other versions do not. Rows of ``nvfp4`` and ``fp8_ds_mla`` are kept in 16 bits,
    too.
    """
    tile, step, stages = configuration.tile, configuration.step, configuration.stages
    fixed = tile * limits.query_bytes
    if configuration.kernel == "low":
        return fixed + tile * step * 4 * 4 + stages * step * limits.row_bytes
    if configuration.kernel == "wide":
        return fixed + tile * step * 2 + stages * step * limits.row_bytes + 1024
    loaded = max(stages - 1, 1) * step * limits.row_bytes
    return fixed + tile * step * 2 + loaded + step * limits.converted_bytes
