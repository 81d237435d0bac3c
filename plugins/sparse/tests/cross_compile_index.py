"""Compile the kernels of an index for GPUs that may be absent. With core/tests on the path:

python cross_compile_index.py          prints [SM, kernel, shared bytes] of all
python cross_compile_index.py --table  those for SM 90, with registers and spills by ptxas
"""

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from attnplug_sparse.index.tiling import DeviceLimits, choose_tiles
from attnplug_sparse.index.triton_score import _spread, score
from attnplug_sparse.index.triton_topk import _translate, choose
from attnplug_testing import ahead

PAGE = 64
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Maximum shared memory of a program, by SM."""
KINDS = {
    **dict.fromkeys(("weights", "scores", "groups"), "*fp32"),
    **dict.fromkeys(("page_table", "numbers", "infos", "counts"), "*i32"),
    **dict.fromkeys(("group_list", "candidates", "chosen", "positions", "slots"), "*i32"),
    "tree": "*i64",
    "scale": "fp32",
}


def compiled(kernel, sm: int, constants: dict[str, object], options: dict[str, object], **pointers: str):
    return ahead.compiled(kernel, sm, {**KINDS, **pointers}, constants, options, ("q_row", "q_head"))


def index(sm: int, queries: int, q: str, keys: str, tree: bool = False):
    config = choose_tiles(queries, 64, 128, DeviceLimits(sm, SHARED[sm]))
    constants = {
        "table_column": 1,
        "tree_column": 1,
        "HEADS": 64,
        "DIM": 128,
        "ALL_HEADS": 64,
        "ALL_DIMS": 128,
        "PAGE_SIZE": PAGE,
        "PAGE_STRIDE": PAGE * (132 if keys == "u8" else 128),
        "SLOT_STRIDE": 128,
        "TILE": config.query_tile,
        "STEP": config.key_tile,
        "GROUP": 8,
        "TREE": tree,
        "OVERLAP": config.overlap,
        "CONVERTS": config.converts_fp8,
    }
    options = {"num_warps": config.warps, "num_stages": config.stages, "launch_pdl": config.overlap}
    return compiled(score, sm, constants, options, q=f"*{q}", keys=f"*{keys}")


def best(sm: int, tree: bool = False, topk: int = 2048, group: int = 8):
    block = min(topk * group, 16384)
    constants = {
        "table_column": 1,
        "tree_column": 1,
        "TOPK": topk,
        "WIDTH": topk,
        "GROUP": group,
        "FEW": 2 * topk,
        "BLOCK": block,
        "CHUNK": min(2 * topk, 4096),
        "PAGE_SIZE": PAGE,
        "SLOTS": True,
        "TREE": tree,
        "OVERLAP": sm >= 90,
    }
    options = {"num_warps": min(max(block // 1024, 4), 16), "launch_pdl": sm >= 90}
    return compiled(choose, sm, constants, options)


def around_index(sm: int) -> Iterator[tuple[str, Any]]:
    yield "spread", compiled(_spread, sm, {"ROWS": 32, "BLOCK": 16}, {})
    constants = {"table_column": 1, "PAGE_SIZE": PAGE, "CHUNK": 1024}
    yield "translate", compiled(_translate, sm, constants, {}, slots="*i32")


def table() -> Iterator[tuple[str, Any]]:
    for queries, keys in itertools.product((1, 2, 0), ("bf16", "u8")):
        yield f"index  {queries} queries, {keys}", index(90, queries, "bf16", keys)
    for topk, group in ((2048, 8), (2048, 16), (512, 8)):
        yield f"best   {topk}, groups of {group}", best(90, topk=topk, group=group)


def some(sm: int) -> Iterator[tuple[str, Any]]:
    yield "index", index(sm, 0, "bf16", "u8")
    if sm == 80:
        yield "index of a tree", index(sm, 0, "bf16", "bf16", tree=True)
    yield "best", best(sm, topk=256, tree=sm == 90)
    yield from around_index(sm)


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        for name, made in table():
            print(f"{name:40} {ahead.resources(made)}, {made.metadata.shared} bytes", flush=True)
    else:
        print(json.dumps([(sm, name, int(made.metadata.shared)) for sm in SHARED for name, made in some(sm)]))
