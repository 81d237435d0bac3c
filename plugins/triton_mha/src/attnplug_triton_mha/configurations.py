"""How the kernel is cut, by the shape of a batch: a table, and what to use on a GPU with less shared memory.

A shape is a request's rows of (query token, head of a group), and the tiles that all requests and KV heads have
together. Actual lengths are not part of it: only the device knows them, a captured graph serves all of them, and the
schedule adapts to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TALLEST = 128


@dataclass(frozen=True, slots=True)
class Configuration:
    tile: int
    """Rows of (query token, head) that a program attends with at once: 16 to 128."""
    step: int
    """Cache rows that a program reads at once: 16 to 128."""
    warps: int
    stages: int
    programs: int
    """Programs per multiprocessor, among which all of a batch's work is divided."""
    prefetch: int = 0
    """Steps that a program asks for before it waits for the previous kernel."""
    single: bool = False
    """Whether programs with one step run code of their own, which asks for queries and cache rows at once."""
    merged: int = 32
    """Numbers of partial results that a thread holds while it merges: more wait together, and take more registers."""
    overlap: bool = True
    """Launch the kernel while the previous one still runs, and let it wait on the device (SM 90 and newer)."""


ANY = 1 << 30
_FEW = Configuration(16, 32, 4, 3, programs=2, prefetch=4, single=True, merged=64)
_SOME = Configuration(16, 64, 4, 3, programs=3, prefetch=2)
_MANY = Configuration(16, 64, 4, 3, programs=4, prefetch=1)
_TALL = Configuration(64, 64, 4, 3, programs=2)
_EXTEND = Configuration(TALLEST, 64, 8, 3, programs=1)
TABLE: tuple[tuple[int, int, Configuration], ...] = (
    # rows of a request up to, tiles up to
    (16, 32, _FEW),
    (16, 256, _SOME),
    (16, ANY, _MANY),
    (32, 32, replace(_FEW, tile=32)),
    (32, ANY, replace(_SOME, tile=32)),
    (64, ANY, _TALL),
    (ANY, ANY, _EXTEND),
)
TABLE_FP8 = tuple((rows, tiles, replace(entry, stages=4)) for rows, tiles, entry in TABLE)
"""For fp8 caches, whose steps have half the bytes: one more of them is on its way."""
ENTRIES = tuple(entry for *_, entry in (*TABLE, *TABLE_FP8))
_NARROW = 64
"""Columns of a key and of a value up to which four warps hold the tallest tile, and are faster than eight (H200)."""
_LEAST_TILE = 16
_LEAST_STEP = 16


def choose(rows: int, requests: int, kv_heads: int, fp8: bool) -> Configuration:
    """The configuration for ``requests`` with up to ``rows`` of (query token, head of a group) each."""
    table = TABLE_FP8 if fp8 else TABLE
    return next(entry for most, tiles, entry in table if rows <= most and requests * kv_heads <= tiles)


@dataclass(frozen=True, slots=True)
class Room:
    """What a configuration must fit: a program's shared memory, and the columns of a padded key and value."""

    sm: int
    shared_bytes: int
    width: int
    v_width: int
    fp8: bool = False


def fitting(configuration: Configuration, room: Room) -> Configuration:
    """The configuration, or one with fewer stages, shorter steps or lower tiles that fits."""
    fits = configuration if room.sm >= 90 else replace(configuration, overlap=False, prefetch=0)
    if fits.tile == TALLEST and max(room.width, room.v_width) <= _NARROW:
        fits = replace(fits, warps=4)
    while _shared_bytes(fits, room) > room.shared_bytes:
        if fits.stages > 2:
            fits = replace(fits, stages=fits.stages - 1)
        elif fits.step > 2 * _LEAST_STEP:
            fits = replace(fits, step=fits.step // 2)
        elif fits.tile > _LEAST_TILE:
            fits = replace(fits, tile=fits.tile // 2, warps=max(fits.warps // 2, 4))
        elif fits.stages > 1:
            fits = replace(fits, stages=1)
        else:
            break
    return fits


def _shared_bytes(configuration: Configuration, room: Room) -> int:
    """Shared memory that the compiler takes at most: queries, weights, and cache rows of all stages.

    fp8 rows are there once more as converted to 16 bits: those of tall tiles always, others by some versions of Triton.
    """
    tile, step = configuration.tile, configuration.step
    columns = room.width + room.v_width
    rows = configuration.stages * step * columns * (1 if room.fp8 else 2)
    converted = step * columns * 2 if room.fp8 else 0
    return tile * 2 * (room.width + step) + rows + converted


def most_partial_rows(multiprocessors: int, kv_heads: int) -> int:
    """Rows of partial results that any entry of the table can need at once, over all KV heads."""
    return max(2 * max(entry.programs * multiprocessors, kv_heads) * entry.tile for entry in ENTRIES)
