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
    """Rows of (query token, head) that a program attends with at once: 16, 32 or 64."""
    step: int
    """Cache rows at once: 32, 64 or 128."""
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
    merge_parts: int = 32
    """Parts that a program of the merging kernel takes at once."""
    merge_columns: int = 128
    """Columns that a merging program takes at once."""
    half_partials: bool = False
    """Partial results in the queries' type instead of float32: half of the bytes to be merged."""


ANY = 1 << 30

# Not measured yet: by the numbers at the head of triton_attention.py and triton_merge.py, and by what the compiler says
# of registers and shared memory on SM 90. Few requests: small steps, so that all multiprocessors have one, and a kernel
# that merges, since parts are many. Many requests: large steps, and the last program merges two or three parts.
_FEW = Configuration(16, 32, 4, 3, merge="kernel")
_SOME = Configuration(16, 64, 4, 2, merge="kernel")
_MANY = Configuration(16, 64, 4, 2, merge="last", part_cost=0.25)
TABLE: tuple[tuple[int, int, Configuration], ...] = (
    # rows of a request up to, requests up to
    (16, 2, _FEW),
    (16, 32, _SOME),
    (16, ANY, _MANY),
    (32, 2, replace(_FEW, tile=32)),
    (32, 32, replace(_SOME, tile=32)),
    (32, ANY, replace(_MANY, tile=32)),
    (ANY, 2, Configuration(64, 32, 8, 3, merge="kernel")),
    (ANY, 16, Configuration(64, 64, 8, 2, merge="kernel")),
    (ANY, ANY, Configuration(64, 64, 8, 2, merge="last", part_cost=0.25)),
)
RAGGED = Configuration(64, 64, 8, 2, merge="last", part_cost=0.25)
"""For batches whose requests have different numbers of rows: tall tiles, as prefill fills them."""

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


def fitting(configuration: Configuration, shared_bytes: int, row_dim: int, q_bytes: int, kv_bytes: int) -> Configuration:
    """The configuration, or one with fewer stages, shorter steps or lower tiles that fits so much shared memory."""
    fits = configuration
    while _shared_bytes(fits, row_dim, q_bytes, kv_bytes) > shared_bytes:
        if fits.stages > 2:
            fits = replace(fits, stages=fits.stages - 1)
        elif fits.step > 32:
            fits = replace(fits, step=fits.step // 2)
        elif fits.stages > 1:
            fits = replace(fits, stages=1)
        elif fits.tile > 16:
            fits = replace(fits, tile=fits.tile // 2)
        else:
            break
    return fits


def _shared_bytes(configuration: Configuration, row_dim: int, q_bytes: int, kv_bytes: int) -> int:
    """Queries, the stages' cache rows, and once more in the queries' type where they are converted."""
    step = configuration.step * row_dim
    converted = step * q_bytes if kv_bytes != q_bytes else 0
    return configuration.tile * row_dim * q_bytes + configuration.stages * step * kv_bytes + converted
