"""The kernels of HiSparse, compiled for GPUs that may be absent."""

from collections.abc import Iterator

from attnplug_sparse.hisparse.triton_rows import TILE_ROWS, WARPS, _gather, row_constants
from attnplug_sparse.hisparse.triton_swap import _FEW_ROWS, _PLANNING_WARPS, _stage, _swap_in, _translate
from attnplug_testing.ahead import compiled, resources

INT32 = ("out", "positions", "page_table", "seq_lens", "new_lens", "held", "sources", "targets", "ready", "done")
INT64 = ("table_rows", "new_slots", "counters", "host", "device", "kept", "cells", "slots")
TYPES = {
    **dict.fromkeys(INT32, "*i32"),
    **dict.fromkeys(INT64, "*i64"),
    **dict.fromkeys(("hints", "order"), "*i16"),
    "touched": "*i8",
    "layer_words": "i64",
}
ALIGNED = ("position_row", "table_row", "layer_words", "context")
ROW = {**row_constants(1152), "ROWS": TILE_ROWS}
BATCH = {"NODES": 1, "RAGGED": False, "PAGE_ROWS": 64, "RATIO": 1, "BLOCK_REQUESTS": 1}
TABLES = {"CHOSEN": 2048, "COLUMNS": 4096}
SWAP = {**BATCH, **TABLES, **ROW, "ROWS": _FEW_ROWS, "BLOCK_WANTED": 2048, "BLOCK_COLUMNS": 4096}
VERIFY = {**SWAP, "NODES": 4, "CHOSEN": 512}
PREFILL = {**BATCH, "RAGGED": True, "BLOCK_REQUESTS": 16}
KERNELS = [
    ("swap in", _swap_in, SWAP, _PLANNING_WARPS),
    ("swap in verified rows", _swap_in, VERIFY, _PLANNING_WARPS),
    ("swap in entries", _swap_in, {**SWAP, "RATIO": 4, "PAGE_ROWS": 32}, _PLANNING_WARPS),
    ("stage", _stage, {**PREFILL, **ROW}, WARPS),
    ("translate", _translate, {**PREFILL, "CHOSEN": 2048, "BLOCK_CHOSEN": 2048}, 4),
    ("gather", _gather, {**ROW, "BACK": True}, WARPS),
]


def facts() -> Iterator[tuple[int, str, int, bool]]:
    """SM, kernel, bytes spilled, and whether it loads 16 bytes at a time."""
    for sm in (80, 90):
        for name, kernel, constants, warps in KERNELS if sm == 90 else KERNELS[:1]:
            made = compiled(kernel, sm, TYPES, constants, {"num_warps": warps}, ALIGNED)
            yield sm, name, resources(made)[1], "ld.global.v2.b64" in made.asm["ptx"]
