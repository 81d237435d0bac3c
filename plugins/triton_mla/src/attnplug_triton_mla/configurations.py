"""How the kernels are cut, by the shape of a batch: a table, and what fits a GPU that has less memory than its entry.

What a shape is: rows of (query token, head) of a request, and how many requests. Not lengths: those are the device's
to know, a captured graph serves them all, and the schedule answers them by itself. ``benchmarks/tune_triton_mla.py``
measures candidates for every shape over several lengths and prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Merge = Literal["last", "kernel"]


@dataclass(frozen=True, slots=True)
class Configuration:
    tile: int
    """Rows of (query token, head) that a program attends with at once: 16 or 32."""
    step: int
    """Cache rows at once: 32 or 64."""
    warps: int
    stages: int
    programs: int = 1
    """Programs for each multiprocessor. All of a batch's work is divided evenly among them."""
    least_steps: int = 1
    """A program takes at least so many steps; fewer programs have work then."""
    part_cost: float = 0.0
    """What merging one more part costs, in steps: above 0, long requests are cut into fewer parts."""
    merge: Merge = "kernel"
    """Who merges the parts of a tile: the program that comes ``last``, or a ``kernel`` behind it, where every request
    has equally many rows."""
    merge_parts: int = 64
    """Parts that a program of the merging kernel takes at once."""
    merge_columns: int = 64
    """Columns that a merging program takes at once."""
    overlap: bool = False
    """Launch each kernel while the one in front of it still runs, to wait on the device (SM 90 and newer)."""


ANY = 1 << 30

# Chosen from benchmarks/results/triton_mla_cuts_h200.json. 32 rows of few requests are two tiles of 16: a program reads
# its queries from shared memory at every step, so that fewer of them in more programs are faster.
_LOW = Configuration(16, 64, 4, 3, merge_parts=16, merge_columns=512, overlap=True)
_LOW_FEW = replace(_LOW, merge_parts=128, merge_columns=32)
_TALL = Configuration(32, 64, 8, 3, merge_parts=16, merge_columns=512, overlap=True)
_TALL_MANY = replace(_TALL, step=32, warps=4, programs=2)
TABLE: tuple[tuple[int, int, Configuration], ...] = (
    # rows of a request up to, requests up to
    (16, 2, _LOW_FEW),
    (16, ANY, _LOW),
    (32, 2, _LOW_FEW),
    (32, 8, _LOW),
    (32, ANY, _TALL),
    (ANY, 8, _TALL),
    (ANY, ANY, _TALL_MANY),
)
RAGGED = replace(_TALL, merge="last", merge_columns=128, part_cost=0.25)
"""For batches whose requests have different numbers of rows, as those of a prefill."""

INVARIANT_PARTS = 16
"""Parts of a tile under ``batch_invariant``, at most: memory is reserved for so many of every tile."""
_INVARIANT_STEPS = 4
_INVARIANT_REQUESTS = 16
"""The entry of the table that serves every number of requests then."""


def choose(rows: int, requests: int, invariant: bool) -> Configuration:
    """For ``requests`` with ``rows`` of (query token, head) each; 0 rows: they differ.

    With ``invariant`` the number of requests decides nothing.
    """
    if not rows:
        return RAGGED
    if invariant:
        requests = _INVARIANT_REQUESTS
    found = next(entry for most_rows, most, entry in TABLE if rows <= most_rows and requests <= most)
    return replace(found, least_steps=_INVARIANT_STEPS) if invariant else found


def most_partials(multiprocessors: int) -> int:
    """Rows of partial results that any entry of the table can need at once."""
    entries = (RAGGED, *(entry for _, _, entry in TABLE))
    return max(2 * entry.programs * multiprocessors * entry.tile for entry in entries)


@dataclass(frozen=True, slots=True)
class Room:
    """What a GPU and the element types leave: shared memory of a program, and bytes of a query and of a cache row."""

    sm: int
    shared_bytes: int
    query_bytes: int
    row_bytes: int


def fitting(configuration: Configuration, room: Room) -> Configuration:
    """The configuration, or one with fewer stages, shorter steps or lower tiles that there is room for."""
    fits = configuration
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
    """What the compiler takes: queries, weights, cache rows of all stages but the one being loaded, converted ones."""
    tile, step = configuration.tile, configuration.step
    converted = room.query_bytes if room.row_bytes != room.query_bytes else 0
    rows = max(configuration.stages - 1, 1) * room.row_bytes + converted
    return tile * room.query_bytes + tile * step * 2 + step * rows
