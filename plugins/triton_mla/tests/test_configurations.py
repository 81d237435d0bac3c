"""The table: every shape finds an entry, and what is chosen for a GPU compiles for it and fits, without that GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from attnplug_triton_mla.configurations import RAGGED, TABLE, Room, choose, fitting, most_partials

KIB = 1024
SHARED = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
"""What a program can have of shared memory, by SM."""
WIDTH = 576
ENTRIES = [RAGGED, *(entry for *_, entry in TABLE)]


def test_every_shape_finds_its_entry():
    for rows in (1, 8, 16, 17, 32, 33, 64, 128, 1024):
        for requests in (1, 2, 3, 16, 64, 1000):
            entry = choose(rows, requests, False)
            assert entry in ENTRIES
            assert rows > entry.tile or entry.tile < 2 * max(rows, 16), "a tile half of which is never used"
    assert choose(0, 4, False) is RAGGED


def test_invariance_leaves_the_number_of_requests_out():
    for rows in (0, 16, 32, 128):
        assert len({choose(rows, requests, True) for requests in (1, 2, 3, 40, 1000)}) == 1


def test_who_merges_a_batch_of_different_rows():
    """The merging kernel counts on equally many rows of every request."""
    assert RAGGED.merge == "last"


def test_memory_is_for_the_largest_entry():
    assert most_partials(132) == max(2 * entry.programs * 132 * entry.tile for entry in ENTRIES)


@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("row_bytes", [2 * WIDTH, WIDTH], ids=["16 bits", "fp8"])
def test_what_is_chosen_has_room_by_our_own_count(sm, row_bytes):
    room = Room(sm, SHARED[sm], 2 * WIDTH, row_bytes)
    for entry in ENTRIES:
        found = fitting(entry, room)
        rows = found.tile * 2 * WIDTH + max(found.stages - 1, 1) * found.step * row_bytes
        assert rows <= SHARED[sm] and found.tile >= 16 and found.step >= 32
        if sm == 90 and row_bytes == 2 * WIDTH:
            assert found == entry, "the table is for this GPU"


def test_an_early_launch_is_for_gpus_that_know_it():
    entry = replace(RAGGED, overlap=True)
    assert [fitting(entry, Room(sm, 1 << 20, 2 * WIDTH, WIDTH)).overlap for sm in (80, 90)] == [False, True]


def test_it_compiles_for_gpus_and_fits_them() -> None:
    """By Triton's compiler, which needs no GPU; whether it is right or fast there is not said."""
    wanted = []
    for sm, entry, q, cache, page_size in (
        (90, choose(128, 100, False), "bf16", "bf16", 64),
        (90, choose(16, 1, False), "bf16", "bf16", 48),
        (100, choose(128, 1, False), "fp16", "fp8e4nv", 1),
    ):
        row_bytes = WIDTH if cache == "fp8e4nv" else 2 * WIDTH
        found = fitting(entry, Room(sm, SHARED[sm], 2 * WIDTH, row_bytes))
        wanted.append({"sm": sm, "cut": asdict(found), "q": q, "cache": cache, "page_size": page_size})
    script = Path(__file__).with_name("cross_compile.py")
    command = [sys.executable, str(script), json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for case, taken in zip(wanted, json.loads(done.stdout), strict=True):
        assert 0 < taken <= SHARED[case["sm"]], case
