"""The kernels of quantized weights, compiled for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

import torch

from attnplug_engine.kernels.quantized_experts import _grouped_product
from attnplug_engine.kernels.quantized_gemm import MOST_ROWS, _quantized_gemm, _scale_rows, tile
from attnplug_engine.kernels.quantized_skinny import _quantized_skinny
from attnplug_engine.kernels.quantized_skinny import tile as skinny_tile
from attnplug_testing import ahead

HALF = dict.fromkeys(("out", "x", "bias", "onto"), "*bf16")
FORMATS: dict[str, tuple[str, str, int, int]] = {
    "fp8": ("*u8", "*fp32", 128, 128),
    "int4": ("*i32", "*bf16", 32, 1),
    "mxfp4": ("*u8", "*u8", 32, 1),
}
"""Types of codes and scales, columns and rows of a scale."""


def product(sm: int, form: str, rows: int, *, scaled: bool, gated: bool) -> Any:
    codes, scales, group, high = FORMATS[form]
    block_n, warps, stages = tile(24576, rows, 2 if gated else 1, torch.device("cpu"))
    shared = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}[sm] << 10
    stages = min(stages, max((shared // 2 - 2048) // (((2 if gated else 1) * block_n + 2 * rows) * 128), 2))
    constants = {
        "K": 7168, "GROUP": group, "ROWS_PER_SCALE": high, "FORMAT": form, "SCALED": scaled, "ROWS": rows,
        "BLOCK_N": block_n, "BLOCK_K": 128, "STAGES": stages, "GATED": gated, "BIAS": False, "ONTO": not gated,
        "EARLY": sm >= 90,
    }  # fmt: skip
    kinds = HALF | {"codes": "*fp8e4nv" if scaled else codes, "scales": scales}
    options = {"num_warps": warps, **({"launch_pdl": True} if sm >= 90 else {})}
    return ahead.compiled(_quantized_gemm, sm, kinds, constants, options, ("x_stride", "out_stride", "onto_stride"))


def skinny(sm: int, *, gated: bool) -> Any:
    block_n, block_k, warps = skinny_tile(8192, 2048, 2 if gated else 1)
    constants = {
        "K": 2048, "GROUP": 128, "ROWS_PER_SCALE": 128, "ROWS": 1, "BLOCK_N": block_n, "BLOCK_K": block_k,
        "BFLOAT16": True, "GATED": gated, "NORM": gated, "BIAS": False, "ONTO": not gated, "EARLY": sm >= 90,
    }  # fmt: skip
    kinds = HALF | {"x": "*i64", "codes": "*i32", "scales": "*fp32", "gain": "*i64", "eps": "fp32"}
    options = {"num_warps": warps, **({"launch_pdl": True} if sm >= 90 else {})}
    return ahead.compiled(_quantized_skinny, sm, kinds, constants, options, ("x_stride", "out_stride", "onto_stride"))


def grouped(sm: int, form: str) -> Any:
    codes, scales, group, high = FORMATS[form]
    constants = {
        "PER_ROW": 8, "EXPERTS": 256, "N": 2048, "K": 7168, "CODES": 4096 * 7168, "SCALES": 32 * 56, "GROUP": group,
        "ROWS_PER_SCALE": high, "FORMAT": form, "ACTIVATED": True, "GATED": True, "LIMIT": 7.0, "ALPHA": 1.702,
        "OFFSET": 1.0, "BIAS": True, "PAIRS": 16, "COLUMNS": 64,
        "BLOCK_K": 128, "BOUNDS": 256, "EARLY": sm >= 90,
    }  # fmt: skip
    kinds = HALF | {"codes": codes, "scales": scales, "order": "*i32", "offsets": "*i32"}
    options = {"num_warps": 4, "num_stages": 3, **({"launch_pdl": True} if sm >= 90 else {})}
    return ahead.compiled(_grouped_product, sm, kinds, constants, options, ("x_row",))


def every_kernel(sm: int) -> Iterator[tuple[str, Any]]:
    """Every one for SM 90, those that depend on the GPU for others."""
    if sm >= 89:
        yield "fp8, scaled", product(sm, "fp8", 16, scaled=True, gated=False)
    if sm in (80, 90):
        yield "fp8, decoded", product(sm, "fp8", 16, scaled=False, gated=False)
    if sm != 90:
        return
    yield "few rows", skinny(sm, gated=False)
    yield "few rows, gated", skinny(sm, gated=True)
    yield "fp8, scaled, gated", product(sm, "fp8", MOST_ROWS, scaled=True, gated=True)
    for form in ("int4", "mxfp4"):
        yield form, product(sm, form, 16, scaled=False, gated=False)
    for form in FORMATS:
        yield f"experts, {form}", grouped(sm, form)
    kinds = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"}
    constants = {"K": 7168, "GROUP": 128, "EARLY": True}
    yield "rows", ahead.compiled(_scale_rows, sm, kinds, constants, {"num_warps": 1, "launch_pdl": True}, ("x_stride",))


def facts() -> Iterator[tuple[int, str, int, int, bool]]:
    """SM, kernel, bytes of shared memory, spilled bytes; True if tensor cores take fp8."""
    for sm in (80, 89, 90, 100, 120):
        for name, made in every_kernel(sm):
            text = made.asm["ptx"]
            takes = "e4m3.e4m3" in text or "kind::f8f6f4" in text
            yield sm, name, int(made.metadata.shared), ahead.resources(made)[1], takes


if __name__ == "__main__":
    for fact in facts():
        print(*fact)
