"""Compiles the plugin's kernels for GPUs that need not be present, and prints their needs. With core/tests on the path:

python cross_compile.py '[{"sm": …, "cut": CONFIGURATION, "q": TYPE, "format": FORMAT, "page_size": …}, …]'
    the attention kernel of each case, and for SM 90 both plans and the merge; prints [SM, kernel, shared bytes]
    of all
python cross_compile.py --table    every entry of the table on SM 90, with registers and spills by ptxas; minutes
"""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attnplug_sparse.index.triton_schedule import _plan
from attnplug_testing import ahead
from attnplug_triton_mha.gluon_attention import CHUNK, MAX_BOX
from attnplug_triton_mla.configurations import ENTRIES, INVARIANT, INVARIANT_WIDE, RAGGED, TABLES, MLAKernelConfig
from attnplug_triton_mla.gluon_low import attend_low
from attnplug_triton_mla.gluon_ragged import attend_ragged_rows
from attnplug_triton_mla.gluon_wide import attend_wide
from attnplug_triton_mla.ragged import RaggedConfig
from attnplug_triton_mla.triton_attention import attend as attend_triton
from attnplug_triton_mla.triton_merge import _LOADED_SPLITS, _SPLIT_COLUMNS, _SPLIT_TOPS, _merge, _merge_splits
from attnplug_triton_mla.triton_ragged import attend_ragged

RANK, ROPE, PAGE = 512, 64, 64
POINTERS = {
    **dict.fromkeys(("lse", "partials", "partial_weights"), "*fp32"),
    **dict.fromkeys(("page_table", "counters", "numbers", "seq_lens", "new_lens"), "*i32"),
    **dict.fromkeys(("slots", "tree"), "*i64"),
}
FLOATS = dict.fromkeys(("scale", "out_scale", "rope_scale", "part_cost"), "fp32")
ROWS = {
    "fp8": (RANK + ROPE, 0, 0, "fp8e4nv"),
    "fp8_per_token_head": (RANK + 16 + 2 * ROPE, RANK, RANK + 16, "u8"),
    "fp8_ds_mla": (RANK + 16 + 2 * ROPE, RANK, RANK + 16, "u8"),
    "nvfp4": (RANK // 2 + RANK // 16 + 2 * ROPE, RANK // 2, RANK // 2 + RANK // 16, "u8"),
}
"""Width of a row, first bytes of its scales and its rope, and the type of its memory; by format."""


def compiled(kernel, sm: int, constants: dict[str, object], options: dict[str, object], **pointers: str):
    kinds = {**POINTERS, **FLOATS, **pointers}
    return ahead.compiled(
        kernel,
        sm,
        kinds,
        constants,
        options,
        ("q_row", "q_head", "q_rope_row", "q_rope_head"),
        GluonASTSource if kernel in (attend_low, attend_wide, attend_ragged_rows) else ASTSource,
    )


def attend(
    sm: int,
    cut: dict[str, object],
    q: str,
    format: str,
    page_size: int = PAGE,
    apart: bool = False,
    tree: bool = False,
    selected: bool = False,
):
    row, scale_at, rope_at, cache = ROWS.get(format, (RANK + ROPE, 0, 0, q))
    constants = {
        "table_column": 1,
        "HEADS": 16,
        "RANK": RANK,
        "ROPE": ROPE,
        "PAGE_SIZE": page_size,
        "PAGE_STRIDE": page_size * row,
        "SLOT_STRIDE": row,
        "LSE": True,
        "SEPARATE_Q_ROPE": apart,
        "OVERLAP": cut["overlap"],
        "SELECTED": selected,
    }
    options = {"num_warps": cut["warps"], "launch_pdl": cut["overlap"]}
    types = {"q": f"*{q}", "q_rope": f"*{q}", "out": f"*{q}", "cache": f"*{cache}"}
    splits = {"SPLIT": cut["split"], "GROWS": cut["grows"], "TILE_ROWS": 16 if cut["split"] else cut["tile"]}
    if cut["kernel"] == "wide":
        return compiled(attend_wide, sm, constants | splits, options, **types)
    if cut["kernel"] == "low":
        return compiled(attend_low, sm, constants | {"STEP": cut["step"], "BUFFERS": cut["stages"]}, options, **types)
    constants |= {
        **splits,
        "tree_column": 1,
        "TREE": tree,
        "FORMAT": format,
        "SCALE_AT": scale_at,
        "ROPE_AT": rope_at,
        "TILE": cut["tile"],
        "STEP": cut["step"],
        "MERGE_COLUMNS": cut["merge_columns"] if cut["merge"] == "last" and not cut["split"] else 0,
    }
    options |= {"num_stages": cut["stages"], "maxnreg": cut["registers"]}
    return compiled(attend_triton, sm, constants, options, **types)


def merge(sm: int, cut: dict[str, object], q: str):
    constants = {
        "QUERIES": 1,
        "HEADS": 16,
        "RANK": RANK,
        "TILE": cut["tile"],
        "COLUMNS": cut["merge_columns"],
        "BLOCK": cut["merge_parts"],
        "FEW": min(cut["merge_parts"], 32),
        "LSE": True,
        "OVERLAP": cut["overlap"],
    }
    options = {"num_warps": cut["merge_warps"], "launch_pdl": cut["overlap"]}
    return compiled(_merge, sm, constants, options, out=f"*{q}")


def merge_splits(sm: int, cut: dict[str, object], q: str):
    constants = {
        "QUERIES": 1,
        "HEADS": 16,
        "RANK": RANK,
        "TILE": cut["tile"],
        "TILE_ROWS": 16,
        "STEP": cut["step"],
        "SPLIT": cut["split"],
        "GROWS": cut["grows"],
        "COLUMNS": _SPLIT_COLUMNS,
        "BLOCK": _SPLIT_TOPS,
        "LOADED": _LOADED_SPLITS,
        "LSE": True,
        "OVERLAP": cut["overlap"],
    }
    return compiled(_merge_splits, sm, constants, {"num_warps": 1, "launch_pdl": cut["overlap"]}, out=f"*{q}")


def plan(sm: int, cut: dict[str, object], queries: int, block: int):
    constants = {
        "QUERIES": queries,
        "HEADS": 16,
        "TILE": cut["tile"],
        "STEP": cut["step"],
        "START": cut["start_steps"],
        "PAGE_SIZE": PAGE,
        "SPLIT": cut["split"],
        "GROWS": cut["grows"],
        "WHOLE": not queries,
        "BLOCK": block,
        "ROWS": queries or 128,
    }
    return compiled(_plan, sm, constants, {"num_warps": min(max(block // 128, 1), 8)})


def ragged(sm: int, config: RaggedConfig, nope: int, rope: int, value: int):
    def rows(number: int, width: int) -> str:
        return f"tensordesc<bf16[{number},1,{width}]>"

    kinds = {
        "queries": rows(config.tile, nope),
        "rope_queries": rows(config.tile, rope or nope),
        "keys": rows(config.step, nope),
        "rope_keys": rows(config.step, rope or nope),
        "values": rows(config.step, value),
        **dict.fromkeys(("tiles", "query_indptr", "kv_indptr"), "*i32"),
        "out": "*bf16",
    }
    constants = {
        "HEADS": 16,
        "NOPE": nope,
        "ROPE": rope,
        "V_DIM": value,
        "V_COLUMNS": value,
        "TILE": config.tile,
        "STEP": config.step,
        "CAUSAL": True,
        "LSE": True,
    }
    return compiled(attend_ragged, sm, constants, {"num_warps": config.warps, "num_stages": config.stages}, **kinds)


def specialized_ragged(sm: int, config: RaggedConfig, nope: int, rope: int, value: int):
    rows = f"tensordesc<bf16[{MAX_BOX.value}, {CHUNK.value}],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"
    pointers = {
        **dict.fromkeys(("tiles", "query_indptr", "kv_indptr"), "*i32"),
        **dict.fromkeys(("q", "out"), "*bf16"),
        **dict.fromkeys(("keys", "values"), rows),
    }
    constants = {
        "HEADS": 16,
        "DIM": nope + rope,
        "V_DIM": value,
        "K_HEAD_COLUMNS": nope + rope,
        "V_HEAD_COLUMNS": nope + value,
        "TILE": config.tile,
        "STEP": config.step,
        "STAGES": config.stages,
        "CAUSAL": True,
        "LSE": True,
    }
    return compiled(attend_ragged_rows, sm, constants, {"num_warps": config.warps}, **pointers)


def resources(made) -> str:
    """Registers of a thread, bytes spilled and shared memory, on SM 90."""
    registers, spilled = ahead.resources(made)
    products = next((name for name in ("wgmma", "mma.sync") if name in made.asm["ptx"]), "")
    return f"{registers:>3} registers, {spilled:>4} spilled, {made.metadata.shared / 1024:5.1f} KiB {products}"


def table() -> Iterator[tuple[str, Any]]:
    """Every kernel that the configuration table needs, by its distinguishing parameters."""
    for entry, queries, block in ((RAGGED, 1, 16), (INVARIANT[0], 1, 256), (RAGGED, 0, 16), (INVARIANT[-1], 0, 1024)):
        name = f"plan   {queries} queries, splits of {entry.split}, {block} requests"
        yield name, plan(90, asdict(entry), queries, block)
    for entry in (*INVARIANT, *INVARIANT_WIDE):
        yield f"merge of splits of {entry.split}", merge_splits(90, asdict(entry), "bf16")
        yield f"attend {entry.kernel} by splits of {entry.split}", attend(90, asdict(entry), "bf16", "plain")
    merges = sorted({(entry.merge_parts, entry.merge_columns, entry.merge_warps) for entry in ENTRIES})
    for parts, columns, warps in merges:
        cut = asdict(replace(RAGGED, merge_parts=parts, merge_columns=columns, merge_warps=warps))
        yield f"merge  {parts} parts, {columns} columns, {warps} warps", merge(90, cut, "bf16")
    cuts = {
        (entry.tile, entry.step, entry.warps, entry.stages, entry.kernel, entry.merge, entry.registers)
        for entry in ENTRIES
    }
    for cut, format in itertools.product(sorted(cuts, key=str), TABLES):
        tile, step, warps, stages, kernel, who, registers = cut
        if kernel != "triton" and format != "plain":
            continue
        entry = MLAKernelConfig(tile, step, warps, stages, kernel, merge=who, overlap=True, registers=registers)
        name = f"{kernel}: {tile} x {step}, {warps} warps, {stages} stages, {who}, {registers or 'any'} registers"
        yield f"attend {name:48} {format:18}", attend(90, asdict(entry), "bf16", format)
        made = attend(90, asdict(entry), "bf16", format, page_size=1, selected=True)
        yield f"attend {name:48} {format:18} selected", made


def every_kernel(cases: list[dict[str, Any]]) -> Iterator[tuple[int, str, Any]]:
    """Attention kernel of each case; for the tile configuration of the first one on SM 90, also the other kernels."""
    for case in cases:
        if "ragged" in case:
            config = RaggedConfig(*case["ragged"])
            if config.specialized:
                yield case["sm"], "specialized ragged", specialized_ragged(case["sm"], config, *case["dims"])
            else:
                yield case["sm"], "ragged", ragged(case["sm"], config, *case["dims"])
        else:
            yield case["sm"], case["cut"]["kernel"], attend(**case)
    first = next(case for case in cases if case["sm"] == 90 and "cut" in case)
    yield 90, "plan", plan(90, first["cut"], queries=1, block=16)
    yield 90, "plan of different rows", plan(90, first["cut"], queries=0, block=16)
    yield 90, "merge", merge(90, first["cut"], first["q"])
    for entry in (*INVARIANT, *INVARIANT_WIDE):
        yield 90, f"{entry.kernel} by splits", attend(90, asdict(entry), first["q"], "plain")
        yield 90, "plan of splits", plan(90, asdict(entry), queries=1, block=16)
        yield 90, "merge of splits", merge_splits(90, asdict(entry), first["q"])


def main(asked: str) -> None:
    if asked == "--table":
        print(f"Triton {triton.__version__}, SM 90")
        for name, made in table():
            print(f"{name:76} {resources(made)}", flush=True)
        return
    found = [(sm, kernel, int(made.metadata.shared)) for sm, kernel, made in every_kernel(json.loads(asked))]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
