"""The kernels of models: compiled for absent GPUs, and compared with references."""

import re
from collections.abc import Iterator
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from attnplug.kv.triton_rows import _write_pairs
from attnplug_engine.kernels.elementwise import _rms_norm, _silu_and_mul
from attnplug_engine.kernels.gemm_tiles import (
    LONG_WAIT_CONFIGS,
    LONG_WAIT_FP8_CONFIGS,
    ONE_ROW_CONFIGS,
    ONE_ROW_FP8_CONFIGS,
    STREAMED,
    STREAMED_GATED,
    GemmConfig,
)
from attnplug_engine.kernels.head_gemm import _by_head
from attnplug_engine.kernels.latent import _absorb, _latent_rows
from attnplug_engine.kernels.preloaded_gemm import _preloaded_gemm
from attnplug_engine.kernels.rotary import _angles, _rotate_heads
from attnplug_engine.kernels.skinny_gemm import _skinny_gemm
from attnplug_engine.kernels.streamed_gemm import _streamed_gemm
from attnplug_engine.kernels.tiled_gemm import _tiled_gemm
from attnplug_testing import ahead

FLOAT32 = dict.fromkeys(("cos", "sin", "frequencies"), "*fp32")
INTEGERS = dict.fromkeys(("slots", "positions"), "*i64")
NUMBERS = dict.fromkeys(("eps", "factor", "scale", "value_scale"), "fp32")
POINTERS = (
    "out", "x", "weight", "bias", "onto", "gain", "q_gain", "k_gain", "rows", "q", "down", "pages", "value_pages",
    "values", "scales",
)  # fmt: skip


def compiled(kernel: Any, sm: int, constants: dict[str, object], scalars: tuple[str, ...], warps: int) -> Any:
    types = {**dict.fromkeys(POINTERS, "*bf16"), **FLOAT32, **INTEGERS, **NUMBERS, **dict.fromkeys(scalars, "i32")}
    if kernel in (_skinny_gemm, _tiled_gemm):
        types |= {"x": "*i32", "weight": "*i32"}
    if kernel is _preloaded_gemm and constants["GROUP"]:
        types |= {"weight": "*fp8e4nv", "scales": "*fp32"}
    early = sm >= 90
    options = {"num_warps": warps, **({"launch_pdl": True} if early else {})}
    strides = [name for name in kernel.arg_names if name.endswith("stride")]
    source = GluonASTSource if kernel is _preloaded_gemm else ASTSource
    return ahead.compiled(kernel, sm, types, {**constants, "EARLY": early}, options, strides, source)


def product(rows: int, inputs: int, block_n: int, block_k: int, *, gated: bool, norm: bool, onto: bool) -> dict:
    shape = {"K": inputs, "ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return {**shape, "BFLOAT16": True, "GATED": gated, "NORM": norm, "BIAS": False, "ONTO": onto}


def streamed(cut: GemmConfig, rows: int, *, gated: bool) -> dict:
    shape = {"K": 2048, "ROWS": rows, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "STAGES": cut.stages}
    return {**shape, "GATED": gated, "BIAS": False, "ONTO": not gated}


def preloaded(config: GemmConfig, *, gated: bool, group: int = 0) -> dict:
    shape = {"K": 2048, "ROWS": 1, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.stages}
    warps = {"WARPS_N": config.warps // config.along, "WARPS_K": config.along}
    scales = {"GROUP": group, "ROWS_PER_SCALE": 128, "SCALE_ROWS": 1}
    return {**shape, **warps, **scales, "GATED": gated, "NORM": True, "BIAS": not gated, "ONTO": not gated}


def by_head(rows: int, inputs: int, outputs: int, block_out: int, *, transposed: bool) -> dict:
    strides = {"W_HEAD": inputs * outputs, "W_IN": outputs, "W_OUT": 1}
    if transposed:
        strides = {"W_HEAD": inputs * outputs, "W_IN": 1, "W_OUT": inputs}
    sizes = {"INPUTS": inputs, "OUTPUTS": outputs, "COPIED": 64, "BLOCK_COPIED": 64, "BLOCK_IN": inputs}
    return {**strides, **sizes, "ROWS": rows, "BLOCK_OUT": block_out}


ROTATED = {"HALF": 32, "BLOCK_HALF": 32, "BLOCK_HEADS": 4}
PAIRS = {
    "PAGE_SIZE": 16, "PAGE_STRIDE": 8192, "SLOT_STRIDE": 512, "HEAD_STRIDE": 64, "DIM_STRIDE": 1, "HEADS": 8, "DIM": 64,
    "FLOAT8": False, "BLOCK": 512, "VALUE_PAGE_STRIDE": 8192, "VALUE_SLOT_STRIDE": 512, "VALUE_HEAD_STRIDE": 64,
    "VALUE_DIM_STRIDE": 1, "VALUE_DIM": 64, "KEY_BLOCKS": 1,
}  # fmt: skip
HEADS = {"QUERIES": 32, "SKIPPED": 0, "HEADS": 40, "DIM": 96, "NORM": True, "BLOCK_REST": 32, **ROTATED}
LATENT = {"HEADS": 16, "NOPE": 128, "LATENT": 512, "BLOCK_LATENT": 512, **ROTATED}
ABSORBED = {
    "W_HEAD": 128 * 512, "W_IN": 512, "W_OUT": 1, "NOPE": 128, "HEADS": 16, "LATENT": 512, "HALF": 32, "PAIRS": True,
    "TOKENS": 16, "BLOCK_NOPE": 128, "BLOCK_OUT": 64, "BLOCK_LATENT": 512, "BLOCK_HALF": 32, "slot_step": 1,
}  # fmt: skip
_TILES = {**product(8, 2048, 16, 512, gated=False, norm=True, onto=False), "WARPS": 4}
PRELOADED = (
    ("preloaded", 0, (ONE_ROW_CONFIGS, LONG_WAIT_CONFIGS)),
    ("preloaded fp8", 128, (ONE_ROW_FP8_CONFIGS, LONG_WAIT_FP8_CONFIGS)),
)
"""Names, columns of a scale, and tables of configurations."""
KERNELS: list[tuple[str, Any, dict[str, object], tuple[str, ...], int]] = [
    ("product", _skinny_gemm, product(1, 2048, 4, 2048, gated=True, norm=True, onto=False), ("rows", "columns"), 4),
    ("product", _skinny_gemm, product(4, 8192, 4, 4096, gated=False, norm=False, onto=True), ("rows", "columns"), 4),
    ("product", _tiled_gemm, _TILES, ("rows", "columns"), 4),
    *(
        (name, _preloaded_gemm, preloaded(each, gated=outputs > 4096, group=group), ("rows", "columns"), each.warps)
        for name, group, tables in PRELOADED
        for table in tables
        for (outputs, _), each in table.items()
        if each.stages
    ),
    ("streamed", _streamed_gemm, streamed(STREAMED, 16, gated=False), ("rows", "columns"), STREAMED.warps),
    (
        "streamed",
        _streamed_gemm,
        streamed(STREAMED_GATED, 64, gated=True),
        ("rows", "columns"),
        STREAMED_GATED.warps,
    ),
    ("by_head", _by_head, by_head(16, 128, 512, 64, transposed=False), ("rows",), 4),
    ("by_head", _by_head, by_head(16, 512, 128, 32, transposed=True), ("rows",), 4),
    ("absorb", _absorb, ABSORBED, ("tokens",), 4),
    ("heads", _rotate_heads, {**HEADS, "PAIRS": False}, (), 2),
    ("latent", _latent_rows, {**LATENT, "PAIRS": True}, (), 2),
    ("angles", _angles, {"HALF": 32, "BLOCK": 32}, (), 1),
    ("rms_norm", _rms_norm, {"WIDTH": 2048, "BLOCK": 2048}, (), 4),
    ("silu_and_mul", _silu_and_mul, {"WIDTH": 8192, "BLOCK": 1024}, (), 4),
    ("pairs", _write_pairs, PAIRS, (), 4),
]

MULTIPLYING = (_tiled_gemm, _streamed_gemm, _absorb, _by_head)
"""By other instructions on SM 80."""


def facts() -> Iterator[dict[str, object]]:
    for sm in (80, 90, 100, 120):
        for name, kernel, constants, scalars, warps in KERNELS:
            if (sm == 80 and kernel not in MULTIPLYING) or (sm > 90 and name != "preloaded fp8"):
                continue
            made = compiled(kernel, sm, constants, scalars, warps)
            before, wait, _ = made.asm["ptx"].partition("griddepcontrol.wait")
            early = before if wait else ""
            yield {
                "kernel": name,
                "sm": sm,
                "loaded_early": len(re.findall(r"\b(?:ld\.global|cp\.async\.c[ag])", early)),
                "stored_early": len(re.findall(r"\bst\.global", early)),
                "approximate_angles": bool(re.search(r"\b(sin|cos)\.approx", made.asm["ptx"])),
                "spilled": ahead.resources(made)[1],
                "shared": int(made.metadata.shared),
            }
