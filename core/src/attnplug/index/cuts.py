"""How the scores of an index are cut, by the shape of a batch and the GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Cut:
    tile: int
    """New tokens of a request, with all their heads, that share a read of its keys: a tile."""
    step: int
    """Keys that a program reads at once."""
    warps: int
    stages: int
    programs: int = 1
    """Programs per multiprocessor. All of a batch's work is divided evenly among them."""
    overlap: bool = False
    """Launch each kernel while the previous one still runs, and let it wait on the device (SM 90 and newer)."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a GPU has: its SM, and the bytes of shared memory that a program can have."""

    sm: int
    shared_bytes: int


START_STEPS = 2
"""The cost of starting another tile, in steps; counted only where lengths differ much."""
_ONE = Cut(1, 64, 4, 4, programs=2)
TILES = {1: _ONE, 2: replace(_ONE, tile=2, stages=3), 4: Cut(4, 128, 8, 3)}
_COLUMNS = 256
"""The most heads of a tile's tokens."""


def choose_cut(queries: int, heads: int, dim: int, room: Room | None) -> Cut:
    """For ``queries`` new tokens per request, 0 if that differs, of an index of ``heads`` × ``dim``.

    The compiler takes shared memory for a tile's queries, and for the keys of all stages, in 16 bits. Without a
    ``room`` there is no GPU, and kernels are interpreted.
    """
    tile = max(size for size in TILES if size <= (queries or 4) and (size == 1 or size * heads <= _COLUMNS))
    found = replace(TILES[tile], overlap=room is not None and room.sm >= 90)
    while room is not None and 2 * dim * (found.tile * heads + found.stages * found.step) + 2048 > room.shared_bytes:
        if found.stages > 2:
            found = replace(found, stages=found.stages - 1)
        elif found.step > 64:
            found = replace(found, step=found.step // 2)
        elif found.tile > 1:
            found = replace(found, tile=found.tile // 2)
        else:
            break
    return found
