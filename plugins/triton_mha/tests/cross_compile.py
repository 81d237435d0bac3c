"""Compiles the plugin's kernels for GPUs that need not be present, and prints their needs. With core/tests on the path:

python cross_compile.py '[{"sm": …, "cut": CONFIGURATION, "type": TYPE, "dim": …, "page_size": …}, …]'
    the attention kernel of each case, and for SM 90 both plans and the merge; prints [SM, kernel, shared bytes]
    of all
python cross_compile.py --fused    of the kernels with splits at absolute positions: elements per thread and loop whose
    weights are computed, and the fused products and sums in PTX, without and with the launch's compiler options
python cross_compile.py --table    every entry of the table on SM 90, with registers and spills by ptxas; minutes
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attnplug_testing import ahead
from attnplug_triton_mha.attention import merged_at_once
from attnplug_triton_mha.configurations import (
    FORMATS,
    INVARIANT,
    PACKS,
    TABLES,
    MergeConfig,
    MHAKernelLimits,
    fit_config,
    merge_config,
    split_merge_config,
)
from attnplug_triton_mha.gluon_attention import CHUNK, MAX_BOX, attend_extend
from attnplug_triton_mha.planner import padded
from attnplug_triton_mha.triton_attention import attend as attend_kernel
from attnplug_triton_mha.triton_merge import _FEW, _LOADED_SPLITS
from attnplug_triton_mha.triton_merge import merge as merge_kernel
from attnplug_triton_mha.triton_merge import merge_splits as merge_splits_kernel
from attnplug_triton_mha.triton_plan import _plan
from attnplug_triton_mha.triton_rows import NVFP4, NVFP4_BITS

GROUP, KV_HEADS = 4, 8
POINTERS = {
    **dict.fromkeys(("lse", "sinks", "partials", "partial_weights"), "*fp32"),
    **dict.fromkeys(("page_table", "counters", "records", "tiles", "merged", "seq_lens", "new_lens"), "*i32"),
    **dict.fromkeys(("slots", "tree"), "*i64"),
}
STORED = {
    "float8_e4m3fn": ("fp8e4nv", 128, "fp8e4nv", 0, 1),
    "fp8_per_token_head": ("fp8e4nv", 128, "fp32", 4, 4),
    "nvfp4": ("u8", 64, "u8", 8, 1),
}
"""By format, for rows of 128 columns: type and bytes of codes, type of scales, their bytes, and the bytes of one."""
FLOATS = dict.fromkeys(("scale", "cap", "value_scale"), "fp32")


def compiled(kernel, sm: int, constants: dict[str, object], options: dict[str, object], **pointers: str):
    kinds = {**POINTERS, **FLOATS, **pointers}
    return ahead.compiled(kernel, sm, kinds, constants, options, ("q_row", "q_head"))


def attend(
    sm: int,
    cut: dict[str, Any],
    type: str,
    dim: int = 64,
    page_size: int = 64,
    window: int = 0,
    extras: bool = False,
    format: str = "",
    pairs: bool = True,
    tree: bool = False,
    separate_merge: bool = False,
    host: bool = False,
):
    """Compile the attention kernel. With ``host``, rows are those of a host, with scales behind the codes."""
    number = FORMATS.get(format, 0)
    pack, stored = PACKS[number], STORED.get(format, (type, 128, type, 0, 1))
    codes, code_bytes, scales, scale_bytes, scale = stored
    rows, width = GROUP if cut["tile"] == 16 else 16, padded(dim, pack)
    row, scale_row = code_bytes * dim // 128, scale_bytes if scale_bytes == scale else scale_bytes * dim // 128
    row += scale_row if host else 0
    strides = {"PAGE": page_size * KV_HEADS * row, "SLOT": KV_HEADS * row, "HEAD": row}
    scale_strides = {name: stride // scale for name, stride in strides.items()}
    if not host:
        cells = scale_row // scale
        scale_strides = {"PAGE": page_size * KV_HEADS * cells, "SLOT": cells, "HEAD": page_size * cells}
    constants = {
        "table_column": 1,
        "HEADS": KV_HEADS * GROUP,
        "GROUP": GROUP,
        "DIM": dim,
        "V_DIM": dim,
        "WIDTH": width,
        "V_WIDTH": width,
        "PAGE_SIZE": page_size,
        **{f"{side}_{name}": value for side in "KV" for name, value in strides.items()},
        **{f"{side}S_{name}": value for side in "KV" for name, value in scale_strides.items()},
        **dict.fromkeys(("K_COLUMN", "V_COLUMN", "KS_COLUMN", "VS_COLUMN"), 1),
        "FORMAT": NVFP4_BITS.value if number == NVFP4.value and sm < 89 else number,
        "INT64": False,
        "PAIRS": pairs,
        "WINDOW": window,
        "CAPPED": extras,
        "SINKS": extras,
        "LSE": extras,
        "TILE": cut["tile"],
        "STEP": cut["step"],
        "SEPARATE_MERGE": separate_merge,
        "MERGE_ROWS": rows,
        "MERGE_PARTS": merged_at_once(rows, width, cut["merge_elements"] * 32 * cut["warps"]),
        "SINGLE": cut["single"],
        "OVERLAP": cut["overlap"],
        "PREFETCH": cut["prefetch"],
        "tree_column": 1,
        "TREE": tree,
        "SPLIT": cut["split"],
        "TILE_ROWS": GROUP if cut["split"] else cut["tile"],
    }
    options = {"num_warps": cut["warps"], "num_stages": cut["stages"], "launch_pdl": cut["overlap"]}
    options |= {"maxnreg": cut["registers"], **cut.get("options", {})}
    pointers = {
        **dict.fromkeys(("q", "out"), type),
        **dict.fromkeys(("keys", "values"), codes),
        **dict.fromkeys(("key_scales", "value_scales"), scales),
    }
    return compiled(attend_kernel, sm, constants, options, **{name: f"*{kind}" for name, kind in pointers.items()})


def attend_long(
    sm: int,
    cut: dict[str, Any],
    type: str,
    dim: int = 64,
    page_size: int = 64,
    window: int = 0,
    extras: bool = False,
    separate_merge: bool = False,
):
    """Compile the attention kernel of long prompts."""
    rows = (
        f"tensordesc<{type}[{min(page_size, MAX_BOX.value)}, {CHUNK.value}],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"
    )
    constants = {
        "table_column": 1,
        "HEADS": KV_HEADS * GROUP,
        "GROUP": GROUP,
        "DIM": dim,
        "V_DIM": dim,
        "PAGE_SIZE": page_size,
        **dict.fromkeys(("K_PAGE", "V_PAGE"), page_size),
        **dict.fromkeys(("K_HEAD", "V_HEAD"), dim),
        "WINDOW": window,
        "CAPPED": extras,
        "SINKS": extras,
        "LSE": extras,
        "TILE": cut["tile"],
        "STEP": cut["step"],
        "STAGES": cut["stages"],
        "SEPARATE_MERGE": separate_merge,
        "OVERLAP": cut["overlap"],
    }
    options = {"num_warps": cut["warps"], "launch_pdl": cut["overlap"]}
    pointers = {"q": f"*{type}", "out": f"*{type}", "keys": rows, "values": rows}
    kinds = {**POINTERS, **FLOATS, **pointers}
    return ahead.compiled(attend_extend, sm, kinds, constants, options, ("q_row", "q_head"), GluonASTSource)


def merge(sm: int, cut: dict[str, Any], type: str, merging: MergeConfig, dim: int = 256):
    constants = {
        "HEADS": KV_HEADS * GROUP,
        "GROUP": GROUP,
        "TILE": cut["tile"],
        "V_DIM": dim,
        "V_WIDTH": 1 << (dim - 1).bit_length(),
        "COLUMNS": merging.columns,
        "PARTS": merging.parts,
        "FEW": min(merging.parts, _FEW),
        "SINKS": True,
        "LSE": True,
        "SCALED": True,
        "OVERLAP": cut["overlap"],
    }
    options = {"num_warps": merging.warps, "launch_pdl": cut["overlap"]}
    return compiled(merge_kernel, sm, constants, options, out=f"*{type}")


def merge_splits(sm: int, cut: dict[str, Any], type: str, dim: int = 128):
    merging = split_merge_config(1, dim)
    constants = {
        "HEADS": KV_HEADS * GROUP,
        "GROUP": GROUP,
        "TILE": cut["tile"],
        "TILE_ROWS": GROUP,
        "V_DIM": dim,
        "V_WIDTH": 1 << (dim - 1).bit_length(),
        "COLUMNS": merging.columns,
        "BLOCK": merging.parts,
        "LOADED": _LOADED_SPLITS,
        "SINKS": True,
        "LSE": True,
        "SCALED": True,
        "OVERLAP": cut["overlap"],
    }
    options = {"num_warps": merging.warps, "launch_pdl": cut["overlap"], **cut.get("options", {})}
    return compiled(merge_splits_kernel, sm, constants, options, out=f"*{type}")


def plan(sm: int, cut: dict[str, Any], uniform: bool, window: int, block: int = 16):
    constants = {
        "UNIFORM": uniform,
        "GROUP": GROUP,
        "TILE": cut["tile"],
        "STEP": cut["step"],
        "WINDOW": window,
        "PAGE_SIZE": 64,
        "SLOTS": True,
        "MERGED": uniform,
        "BLOCK": block,
        "ROWS": 128 if uniform else 32,
        "SPLIT": cut["split"],
    }
    return compiled(_plan, sm, constants, {"num_warps": 1})


def resources(made) -> str:
    """Registers of a thread, bytes spilled and shared memory, on SM 90."""
    registers, spilled = ahead.resources(made)
    products = next((name for name in ("wgmma", "mma.sync") if name in made.asm["ptx"]), "")
    return f"{registers:>3} registers, {spilled:>4} spilled, {made.metadata.shared / 1024:5.1f} KiB {products}"


def table() -> Iterator[tuple[str, Any]]:
    """Every kernel that the configuration table needs, by its distinguishing parameters."""
    for parts, rows in ((132, 16), (33, 32), (16, 16), (16, 4096)):
        cut = merge_config(parts, rows, 256, 132)
        name = f"merge {cut.parts} parts, {cut.columns} columns, {cut.warps} warps"
        yield name, merge(90, asdict(TABLES[0][0][-1]), "bf16", cut)
    for format in ("", *FORMATS):
        number = FORMATS.get(format, 0)
        for entry in (*INVARIANT, *dict.fromkeys(entry for *_, entry in TABLES[number])):
            for dim in (64, 128, 256):
                cut = asdict(fit_config(entry, MHAKernelLimits(90, 227 << 10, dim, dim, number, copied=True)))
                if cut["specialized"]:
                    yield f"long prompts, {dim}", attend_long(90, cut, "bf16", dim)
                    continue
                name = f"{entry.tile:3} x {entry.step}, {entry.warps} warps, {entry.stages} stages, {dim} {format}"
                yield name, attend(90, cut, "bf16", dim, format=format)


def every_kernel(cases: list[dict[str, Any]]) -> Iterator[tuple[int, str, Any]]:
    """Attention kernel of each case; for the tile configuration of the first one on SM 90, also the other kernels."""
    for case in cases:
        if case["cut"]["specialized"]:
            yield case["sm"], "attend long prompts", attend_long(**case)
        else:
            yield case["sm"], "attend", attend(**case)
    first = next(case for case in cases if case["sm"] == 90 and not case["cut"]["specialized"])
    cut = first["cut"]
    yield 90, "plan", plan(90, cut, uniform=True, window=0)
    yield 90, "plan of different rows", plan(90, cut, uniform=False, window=100)
    yield 90, "merge", merge(90, cut, first["type"], merge_config(132, 16, 256, 132))
    fixed = asdict(INVARIANT[-1])
    yield 90, "attend by splits", attend(90, fixed, first["type"], 128)
    yield 90, "plan of splits", plan(90, fixed, uniform=True, window=0)
    yield 90, "merge of splits", merge_splits(90, fixed, first["type"])


def fused() -> Iterator[tuple[str, int, list[list[int]]]]:
    """Fused products and sums of kernels whose bits must not depend on them."""
    for configuration in INVARIANT[:2]:
        cut, found = asdict(configuration), []
        for options in ({}, configuration.compiler_options):
            found.append(
                [
                    made.asm["ptx"].count("fma.rn.f32")
                    for made in (
                        attend(90, {**cut, "options": options}, "bf16"),
                        attend(90, {**cut, "options": options}, "bf16", format="fp8_per_token_head"),
                        merge_splits(90, {**cut, "options": options}, "bf16"),
                    )
                ]
            )
        yield f"tile {cut['tile']}", cut["tile"] * cut["step"] // (32 * cut["warps"]), found


def main(asked: str) -> None:
    if asked == "--fused":
        print(json.dumps(list(fused())))
        return
    if asked == "--table":
        print(f"Triton {triton.__version__}, SM 90")
        for name, made in table():
            print(f"{name:48} {resources(made)}", flush=True)
        return
    found = [(sm, kernel, int(made.metadata.shared)) for sm, kernel, made in every_kernel(json.loads(asked))]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
