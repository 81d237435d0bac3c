"""The batch-invariant GEMMs, compiled for GPUs that may be absent."""

import re
from collections.abc import Iterator
from typing import Any

import compile_experts

from attnplug_engine.kernels import experts
from attnplug_engine.kernels.invariant_gemm import GATED_TILES, TILES, InvariantTile, _add_parts, _invariant_gemm
from attnplug_testing import ahead

SCALARS = dict.fromkeys(("rows", "columns", "out_stride", "x_stride", "onto_stride"), "i32")
MMA = re.compile(r"\b(wgmma\.mma_async\.sync\.aligned\.m64)n\d+(k\d+)|\b(mma\.sync\.aligned\.m\d+n\d+k\d+)")


def gemm(sm: int, tile: InvariantTile, *, gated: bool, divided: bool) -> Any:
    types = {**dict.fromkeys(("out", "x", "weight", "bias", "onto"), "*bf16"), **SCALARS}
    types |= {"out": "*fp32"} if divided else {}
    constants = {
        "K": 4096, "PARTS": 2 if divided else 1, "PART": 2048 if divided else 4096, "DIVIDED": divided, "GROUP": 8,
        "ROWS": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "STAGES": tile.stages, "GATED": gated,
        "BIAS": False, "ONTO": not gated, "EARLY": sm >= 90,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "launch_pdl": sm >= 90}
    return ahead.compiled(_invariant_gemm, sm, types, constants, options, ["out_stride", "x_stride", "onto_stride"])


def add_parts(sm: int, *, gated: bool) -> Any:
    types = {**dict.fromkeys(("out", "bias", "onto"), "*bf16"), **SCALARS, "sums": "*fp32"}
    constants = {"PARTS": 4, "BLOCK": 1024, "GATED": gated, "BIAS": True, "ONTO": not gated, "EARLY": sm >= 90}
    return ahead.compiled(_add_parts, sm, types, constants, {"launch_pdl": sm >= 90}, ["out_stride", "onto_stride"])


def every(sm: int) -> Iterator[tuple[str, Any]]:
    yield "plain", gemm(sm, TILES[0], gated=False, divided=True)
    yield "plain", gemm(sm, TILES[-1], gated=False, divided=False)
    yield "gated", gemm(sm, GATED_TILES[0], gated=True, divided=False)
    yield "gated", gemm(sm, GATED_TILES[-1], gated=True, divided=False)
    for up, down in (experts._INVARIANT[0][1], experts._INVARIANT_LARGEST):
        yield from compile_experts.tiled(sm, up, down, gated=True)
    for gated in (False, True):
        yield "add parts", add_parts(sm, gated=gated)


def facts() -> Iterator[dict[str, object]]:
    """Kernel, tensor-core instructions without their ``n``, shared memory and spilled registers."""
    for name, made in every(90):
        found = {"".join(part for part in groups if part) for groups in MMA.findall(made.asm["ptx"])}
        spilled = ahead.resources(made)[1]
        yield {"kernel": name, "mma": sorted(found), "shared": int(made.metadata.shared), "spilled": spilled}
