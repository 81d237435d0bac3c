"""How the kernels are cut, by the shape of a batch: two tables, and what to use on a GPU with less shared memory.

A shape is a request's rows of (query token, head), the number of requests, and the longest request that the page table
has room for. Actual lengths are not part of it: only the device knows them, a captured graph serves all of them, and
the schedule adapts to them. ``benchmarks/tune_triton_mla.py`` measures candidates for every shape over several lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kernel = Literal["triton", "low", "wide"]
Merge = Literal["last", "kernel"]


@dataclass(frozen=True, slots=True)
class Configuration:
    tile: int
    """Rows of (query token, head) that a program attends with at once: a tile."""
    step: int
    """Cache rows that a program reads at once: 32 or 64."""
    warps: int
    stages: int
    kernel: Kernel = "triton"
    """``triton_attention`` with tiles of 16 or 32; or one for SM 90 and 16-bit caches: ``gluon_low`` with tiles of 16,
    or ``gluon_wide`` with tiles of 64, steps of 64, 8 warps and 2 stages."""
    programs: int = 1
    """Programs per multiprocessor. All of a batch's work is divided evenly among them."""
    start_steps: int = 2
    """The cost of starting another tile, in steps; counted only where lengths differ much."""
    least_steps: int = 1
    """The fewest steps of a program that has work. With little work, some programs have none."""
    part_cost: float = 0.0
    """The cost of merging one more part, in steps. Above 0, long requests are cut into fewer parts."""
    merge: Merge = "kernel"
    """What merges the parts of a tile: the program that finishes ``last``, or a ``kernel`` that follows. The kernel is
    for batches in which every request has the same number of rows."""
    merge_parts: int = 64
    """Parts that a program of the merging kernel takes at once."""
    merge_columns: int = 64
    """Columns that a merging program takes at once."""
    merge_warps: int = 4
    overlap: bool = False
    """Launch each kernel while the previous one still runs, and let it wait on the device (SM 90 and newer)."""


ANY = 1 << 30

Table = tuple[tuple[int, int, int, Configuration], ...]

# Chosen from benchmarks/results/triton_mla_cuts_h200.json. Few short requests with many rows take tiles of 16: more
# programs share the work, and each has less to read before it begins.
_LOW = Configuration(16, 32, 4, 3, "low", merge_parts=16, merge_columns=512, overlap=True)
_LOW_SOME = replace(_LOW, merge_parts=32, merge_columns=64, merge_warps=1)
_LOW_FEW = replace(_LOW, merge_parts=128, merge_columns=32, merge_warps=2)
_LOW_MANY = Configuration(16, 64, 4, 3, merge_parts=16, merge_columns=512, overlap=True)
_WIDE = Configuration(64, 64, 8, 2, "wide", merge_parts=16, merge_columns=512, overlap=True)
_WIDE_SOME = replace(_WIDE, merge_parts=32, merge_columns=64, merge_warps=1)
_WIDE_FEW = replace(_WIDE, merge_parts=64, merge_columns=64, merge_warps=2, part_cost=1 / 16)
TABLE: Table = (
    # rows of a request up to, requests up to, cache rows of a request up to
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
_FP8 = Configuration(16, 64, 4, 4, merge_parts=16, merge_columns=512, overlap=True)
_FP8_MANY = replace(_FP8, stages=3, programs=2)
TABLE_FP8: Table = (
    (16, 2, ANY, replace(_FP8, merge_parts=128, merge_columns=32, merge_warps=1)),
    (16, 8, ANY, replace(_FP8, merge_parts=32, merge_columns=64, merge_warps=1)),
    (16, 32, ANY, _FP8),
    (ANY, 2, ANY, replace(_FP8_MANY, merge_parts=32, merge_columns=64, merge_warps=1)),
    (ANY, ANY, ANY, _FP8_MANY),
)
_TALL = Configuration(32, 64, 8, 3, merge_parts=16, merge_columns=512, overlap=True)
RAGGED = replace(_TALL, merge="last", merge_columns=128, part_cost=0.25)
"""For batches whose requests have different numbers of rows, as in a prefill."""
ENTRIES = (RAGGED, *(entry for *_, entry in (*TABLE, *TABLE_FP8)))

INVARIANT_PARTS = 16
"""The most parts of a tile under ``batch_invariant``. Memory is reserved for this many of every tile."""
_INVARIANT_STEPS = 4
_INVARIANT_REQUESTS = 16
"""With ``batch_invariant``, every batch takes the table's entry for this many requests."""


def choose(rows: int, requests: int, tokens: int, *, fp8: bool, invariant: bool) -> Configuration:
    """The configuration for ``requests`` with ``rows`` of (query token, head) each, over up to ``tokens``.

    ``rows`` is 0 if they differ. With ``invariant``, neither the number of requests nor their length matters.
    """
    if not rows:
        return RAGGED
    if invariant:
        requests, tokens = _INVARIANT_REQUESTS, ANY
    asked, table = (rows, requests, tokens), TABLE_FP8 if fp8 else TABLE
    found = next(entry for *limits, entry in table if all(x <= most for x, most in zip(asked, limits, strict=True)))
    return replace(found, least_steps=_INVARIANT_STEPS) if invariant else found


def on_triton(configuration: Configuration) -> Configuration:
    """The configuration, or its like for the Triton kernel, which serves every GPU, every cache and trees."""
    if configuration.kernel == "triton":
        return configuration
    tile = _TALL.tile if configuration.kernel == "wide" else configuration.tile
    return replace(configuration, kernel="triton", tile=tile, step=_TALL.step, stages=_TALL.stages)


def most_partials(multiprocessors: int) -> int:
    """Rows of partial results that any entry of the tables can need at once."""
    return max(2 * entry.programs * multiprocessors * entry.tile for entry in ENTRIES)


@dataclass(frozen=True, slots=True)
class Room:
    """What a configuration must fit: a program's shared memory, and the bytes of a query row and of a cache row.
    ``copied`` says that Gluon kernels can copy the cache rows."""

    sm: int
    shared_bytes: int
    query_bytes: int
    row_bytes: int
    copied: bool = True


def fitting(configuration: Configuration, room: Room) -> Configuration:
    """The configuration, or one with fewer stages, shorter steps or lower tiles that fits."""
    fits = configuration
    served = room.sm == 90 and room.copied and _shared_bytes(fits, room) <= room.shared_bytes
    if not served:
        fits = on_triton(fits)
    if room.sm < 90:
        fits = replace(fits, overlap=False)
    while _shared_bytes(fits, room) > room.shared_bytes:
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


def _shared_bytes(configuration: Configuration, room: Room) -> int:
    """Shared memory that the compiler takes: queries, weights, and cache rows of all stages but the one being loaded.

    Gluon kernels hold the rows of all their stages. Instead of weights, the low one holds four times the logits; the
    wide one holds some bytes more, to find the largest logit. For fp8 rows Triton 3.8 also holds half a step of
    converted rows; other versions do not.
    """
    tile, step, stages = configuration.tile, configuration.step, configuration.stages
    fixed = tile * room.query_bytes
    if configuration.kernel == "low":
        return fixed + tile * step * 4 * 4 + stages * step * room.row_bytes
    if configuration.kernel == "wide":
        return fixed + tile * step * 2 + stages * step * room.row_bytes + 1024
    converted = step * room.row_bytes if room.row_bytes != room.query_bytes else 0
    return fixed + tile * step * 2 + max(stages - 1, 1) * step * room.row_bytes + converted
