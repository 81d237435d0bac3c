"""How the kernel is cut, by the shape of a batch: a table, and what to use on a GPU with less shared memory.

A shape is a request's rows of (query token, head of a group), and the tiles that all requests and KV heads have
together. Actual lengths are not part of it: only the device knows them, a captured graph serves all of them, and the
schedule adapts to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Merge = Literal["inside", "apart"]
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
    merge: Merge | None = None
    """What merges the parts of a tile: the program that finishes last, ``inside`` the attention kernel, or a kernel
    ``apart``. Without one it depends on how many there may be (``merged_apart``). Where requests have
    different numbers of new rows it is always inside."""
    overlap: bool = True
    """Launch each kernel while the previous one still runs, and let it wait on the device (SM 90 and newer)."""


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
_FEW_FP8 = replace(_FEW, step=64, prefetch=2)
TABLE_FP8: tuple[tuple[int, int, Configuration], ...] = (
    (16, 32, _FEW_FP8),
    (16, 256, _SOME),
    (16, ANY, replace(_MANY, programs=3)),
    (32, 32, replace(_FEW_FP8, tile=32)),
    *TABLE[4:],
)
"""For fp8 caches: a row has half the bytes, so a step has twice as many."""
ENTRIES = tuple(entry for *_, entry in (*TABLE, *TABLE_FP8))
_NARROW = 64
"""Columns of a key and of a value up to which four warps hold the tallest tile, and are faster than eight (H200)."""
WIDE = 256
"""Columns of a key or a value from which a decode has one program per multiprocessor: few more have room there, and
half as many parts are half as much to merge (0.85 of the time with one request of 8192 tokens, H200)."""
_DECODED = 32
"""Rows of the highest tile that a decode has."""
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
    if fits.tile <= _DECODED and max(room.width, room.v_width) >= WIDE:
        fits = replace(fits, programs=1)
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


MERGED_INSIDE = 3
"""Parts of a tile, as many as there may be, up to which the program that finishes last merges them. With so few most
tiles are not divided at all, and a second launch would cost 1.5 µs for nothing (H200). Where tiles are divided it is
faster by 2 µs, however few parts they have."""
_UNEVEN = 2
"""How much longer than the mean a request of a batch is expected to be. One that is longer is merged by more rounds, or
inside the attention kernel."""
_MERGED_NUMBERS = 64
"""Numbers of partial results that a thread of the separate kernel holds."""
_MERGING_WARPS = 4
_LEAST_PARTS = 16
_LEAST_COLUMNS = 32
"""A line of L2: 128 bytes."""


def most_parts(target: int, tiles: int, requests: int, steps: int) -> int:
    """Parts that a tile is expected to have at most, where ``target`` programs share the work of ``tiles``.

    ``steps`` are the most that a tile can have. All tiles of a request are divided alike. Lengths are not known here.
    """
    share = -(-target * min(requests, _UNEVEN) // tiles)
    return max(min(share, steps), 1)


def merged_apart(configuration: Configuration, parts: int) -> bool:
    """Whether a kernel of its own merges tiles of up to ``parts``."""
    return parts > MERGED_INSIDE if configuration.merge is None else configuration.merge == "apart"


@dataclass(frozen=True, slots=True)
class MergeCut:
    """How the separate kernel is cut."""

    parts: int
    """Parts that a program takes at once."""
    columns: int
    """Columns of one row that a program merges."""
    warps: int


def merge_cut(parts: int, rows: int, v_width: int, multiprocessors: int) -> MergeCut:
    """For ``rows`` of (query token, head) whose tiles have up to ``parts``: all at once if a program can hold them, and
    narrow columns while multiprocessors would be left without a program."""
    most = _MERGED_NUMBERS * 32 * _MERGING_WARPS
    at_once = min(max(1 << (parts - 1).bit_length(), _LEAST_PARTS), most // _LEAST_COLUMNS)
    columns = min(most // at_once, v_width)
    while columns > _LEAST_COLUMNS and rows * (v_width // columns) < multiprocessors:
        columns //= 2
    return MergeCut(at_once, columns, max(at_once * columns // (_MERGED_NUMBERS * 32), 1))
