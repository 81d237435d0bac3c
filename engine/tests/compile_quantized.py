"""The kernels of quantized weights, compiled for GPUs that may be absent."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attnplug_engine.kernels.gemm_tiles import GemmConfig, choose_few_codes
from attnplug_engine.kernels.quantized_configs import (
    CONFIGS,
    EXPERTS,
    QuantizedConfig,
)
from attnplug_engine.kernels.quantized_experts import _grouped_product
from attnplug_engine.kernels.quantized_gemm import _quantized_gemm
from attnplug_engine.kernels.scaled_rows import _scale_rows
from attnplug_engine.kernels.skinny_fp8_gemm import _skinny_fp8_gemm
from attnplug_engine.kernels.split_gemm import CODES, PLAIN, SplitConfig, _split_gemm
from attnplug_engine.kernels.tiled_fp8_gemm import CONFIG, _tiled_fp8_gemm
from attnplug_testing import ahead

HALF = dict.fromkeys(("out", "bias", "onto"), "*bf16")
FORMATS: dict[str, tuple[str, str, str, int, int]] = {
    "scaled": ("*fp8e4nv", "*fp8e4nv", "*fp32", 128, 128),
    "fp8": ("*bf16", "*u8", "*fp32", 128, 128),
    "int4": ("*i32", "*u8", "*bf16", 32, 1),
    "mxfp4": ("*i32", "*u8", "*u8", 32, 1),
}
"""Types of rows, codes and scales, columns and rows of a scale."""
SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of a program in KiB."""


def fitted(config: QuantizedConfig, form: str, sm: int) -> QuantizedConfig:
    return replace(config, stages=max(min(config.stages, ((SHARED[sm] << 10) - 2048) // config.stage_bytes(form)), 2))


def options(sm: int, warps: int) -> dict[str, object]:
    return {"num_warps": warps, **({"launch_pdl": True} if sm >= 90 else {})}


def constants(form: str, config: QuantizedConfig, columns: int, sm: int, *, gated: bool) -> dict[str, object]:
    _, _, _, group, high = FORMATS[form]
    return {
        "K": 7168, "GROUP": group, "ROWS_PER_SCALE": high, "ONE_SCALE": not gated and high % columns == 0,
        "FORMAT": form, "UNITS": config.units, "STAGES": config.stages, "NATIVE": True, "GATED": gated,
        "EARLY": sm >= 90,
    }  # fmt: skip


def kinds(form: str) -> dict[str, str]:
    rows, codes, scales, *_ = FORMATS[form]
    return HALF | {"x": rows, "x_scales": "*fp32", "codes": codes, "scales": scales}


def product(sm: int, form: str, config: QuantizedConfig, *, gated: bool = False) -> Any:
    config = fitted(config, form, sm)
    columns = config.columns // (2 if gated else 1)
    made = constants(form, config, columns, sm, gated=gated)
    made |= {
        "ROWS": config.rows, "BLOCK_N": columns, "LINES": 8, "BAND": 8, "BIAS": False, "ONTO": not gated,
    }  # fmt: skip
    strides, types = ("x_stride", "out_stride", "onto_stride"), kinds(form)
    return ahead.compiled(_quantized_gemm, sm, types, made, options(sm, config.warps), strides)


def grouped(sm: int, form: str, config: QuantizedConfig) -> Any:
    config = fitted(config, form, sm)
    made = constants(form, config, config.columns // 2, sm, gated=True)
    made |= {
        "PER_ROW": 8, "EXPERTS": 256, "N": 2048, "CODES": 4096 * 7168, "SCALES": 32 * 56, "ACTIVATED": True,
        "LIMIT": 7.0, "ALPHA": 1.702, "OFFSET": 1.0, "BIAS": True, "PAIRS": config.rows,
        "COLUMNS": config.columns // 2, "SORTED": config.rows > 8, "BOUNDS": 256,
    }  # fmt: skip
    types = kinds(form) | {"order": "*i32", "offsets": "*i32"}
    return ahead.compiled(_grouped_product, sm, types, made, options(sm, config.warps), ("x_stride",))


def few(sm: int, rows: int, width: int, *, gated: bool) -> Any:
    config = choose_few_codes(2048, width, 2 if gated else 1)
    made = {
        "K": width, "GROUP": 128, "ROWS_PER_SCALE": 128, "SCALE_ROWS": 1, "ROWS": rows, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "BFLOAT16": True, "CONVERT": sm >= 89, "GATED": gated, "NORM": gated, "BIAS": False,
        "ONTO": not gated, "EARLY": sm >= 90,
    }  # fmt: skip
    types = HALF | {"x": "*i32", "gain": "*i32", "codes": "*i32", "scales": "*fp32", "eps": "fp32"}
    strides = ("x_stride", "out_stride", "onto_stride")
    return ahead.compiled(_skinny_fp8_gemm, sm, types, made, options(sm, config.warps), strides)


def tiled(sm: int, config: GemmConfig, width: int, *, norm: bool) -> Any:
    made = {
        "K": width, "GROUP": 128, "ROWS_PER_SCALE": 128, "ROWS": 16, "BLOCK_N": config.block_n,
        "PART": config.block_k // (4 * config.warps), "WARPS": config.warps, "NATIVE": True, "NORM": norm,
        "BIAS": False, "ONTO": True, "EARLY": sm >= 90,
    }  # fmt: skip
    types = HALF | {"x": "*i64", "codes": "*i32", "scales": "*fp32", "gain": "*bf16", "eps": "fp32"}
    strides = ("x_stride", "out_stride", "onto_stride")
    return ahead.compiled(_tiled_fp8_gemm, sm, types, made, options(sm, config.warps), strides)


def split(sm: int, config: SplitConfig, rows: int, *, codes: bool, norm: bool) -> Any:
    element = 1 if codes else 2
    made = {
        "K": 8192, "PART": 8192 // config.parts, "PARTS": config.parts, "GROUP": 128, "ROWS_PER_SCALE": 128,
        "CODES": codes, "ROWS": rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "STAGES": config.fitting_stages(rows, element, SHARED[sm] << 10), "LINES": config.prefetched(8192, element),
        "NORM": norm, "BIAS": False, "ONTO": True, "EARLY": sm >= 90,
    }  # fmt: skip
    types = HALF | {"x": "*bf16", "weight": "*fp8e4nv" if codes else "*bf16", "scales": "*fp32", "gain": "*bf16"}
    types |= {"eps": "fp32", "sums": "*fp32", "counters": "*i32"}
    strides = ("x_stride", "out_stride", "onto_stride")
    return ahead.compiled(_split_gemm, sm, types, made, options(sm, config.warps), strides)


def named(config: QuantizedConfig) -> str:
    return "scaled" if config.columns >= 64 else "narrow"


def every_kernel(sm: int) -> Iterator[tuple[str, Any]]:
    """All kernels for SM 90; for others, those that depend on the GPU. Tiles of 64 rows of the matrix or more go to
    Hopper's own tensor-core instruction."""
    if sm >= 89:
        yield "scaled", product(sm, "scaled", CONFIGS["scaled"][-1][-1])
    if sm in (80, 90):
        yield "few rows", few(sm, 2, 2048, gated=True)
        yield "fp8", product(sm, "fp8", CONFIGS["fp8"][0][-1])
        yield "mxfp4", product(sm, "mxfp4", CONFIGS["mxfp4"][1][-1])
        yield "tiled", tiled(sm, CONFIG, 2048, norm=True)
    if sm in (80, 120):
        yield "split", split(sm, PLAIN[-1][-1], 16, codes=False, norm=False)
    if sm != 90:
        return
    for rows, width, gated in ((1, 2048, True), (1, 2048, False), (1, 8192, False), (2, 8192, False), (1, 7168, True)):
        yield "few rows", few(sm, rows, width, gated=gated)
    yield "tiled", tiled(sm, CONFIG, 7168, norm=False)
    for table in (PLAIN, CODES):
        for most, _, _, config in table:
            if config is not None:
                yield "split", split(sm, config, most, codes=table is CODES, norm=False)
    yield "split, normed", split(sm, next(config for *_, config in CODES if config), 16, codes=True, norm=True)
    for *_, config in CONFIGS["scaled"][:-1]:
        yield named(config), product(sm, "scaled", config)
    for *_, config in (*CONFIGS["scaled"][:2], *CONFIGS["scaled"][-2:]):
        yield named(config), product(sm, "scaled", config, gated=True)
    for form in ("int4", "mxfp4"):
        yield form, product(sm, form, CONFIGS[form][0][-1], gated=True)
        yield form, product(sm, form, CONFIGS[form][-1][-1])
    for form in FORMATS:
        for *_, config in EXPERTS[form]:
            yield f"experts, {named(config) if form == 'scaled' else form}", grouped(sm, form, config)
    types = {"x": "*bf16", "gain": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "eps": "fp32"}
    for norm, groups, warps in ((False, 8, 2), (True, 64, 16)):
        made = {"K": 7168, "GROUP": 128, "GROUPS": groups, "NORM": norm, "EARLY": True}
        yield "rows", ahead.compiled(_scale_rows, sm, types, made, options(sm, warps), ("x_stride",))


STORES, LOADS = re.compile(r"st\.shared"), re.compile(r"ld\.global\S*\.v4")
WRITES = re.compile(r"(?:st|atom)\.global")
_REST = r"(?:(?!(?:st|ld)\.global).)*"
ARRIVAL = re.compile(
    rf"st\.global{_REST}bar\.sync{_REST}atom\.global\.gpu\.acq_rel\.add{_REST}bar\.sync{_REST}ld\.global\.cg", re.S
)
"""The last partial sum that a program stores, its arrival, and the first that the last program reads, with barriers of
the program's threads between them."""


def facts() -> Iterator[dict[str, object]]:
    """SM, kernel, bytes of shared memory, spilled bytes; True if tensor cores take fp8; stores to shared memory in its
    loop; loads of 16 bytes before it waits for its input; True if it adds partial sums in the order of
    ``ARRIVAL`` and writes nothing before it waits."""
    for sm in (80, 89, 90, 100, 120):
        for name, made in every_kernel(sm):
            text = made.asm["ptx"]
            early = text.rpartition("griddepcontrol.wait")[0]
            loop = text.split("cp.async.wait_group", 2)[1].split("bra", 1)[0] if "cp.async.wait_group" in text else ""
            yield {
                "sm": sm, "kernel": name, "shared": int(made.metadata.shared), "spilled": ahead.resources(made)[1],
                "fp8": "e4m3.e4m3" in text or "kind::f8f6f4" in text, "stores": len(STORES.findall(loop)),
                "loaded_early": len(LOADS.findall(early)),
                "arrives": ARRIVAL.search(text) is not None and not WRITES.search(early),
            }  # fmt: skip


if __name__ == "__main__":
    for fact in facts():
        print(*fact.values())
