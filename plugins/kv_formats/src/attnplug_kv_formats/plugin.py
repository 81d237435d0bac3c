"""Plugin entry point: declarations of the KV formats. Imports no torch."""

from __future__ import annotations

from attnplug import KVFormat, RowPart, hookimpl

_KERNELS = {"cuda": "attnplug_kv_formats.row_writer:row_writer"}

FP8_PER_TOKEN_HEAD = KVFormat(
    name="fp8_per_token_head",
    summary="e4m3 with a float32 scale per token and head; latent rows keep their rotary part in bfloat16",
    codec="attnplug_kv_formats.fp8_per_token_head",
    parts=(RowPart("float8_e4m3fn"), RowPart("float32", per=None)),
    rope="bfloat16",
    error=0.05,
    kernels=_KERNELS,
)
"""vLLM's format of this name: a head's values, then its scale. Latent rows are those of SnapMLA (arXiv 2602.10718)."""

NVFP4 = KVFormat(
    name="nvfp4",
    summary="e2m1 with an e4m3 scale per 16 values and one scale per layer; latent rows keep their rotary part",
    codec="attnplug_kv_formats.nvfp4",
    parts=(RowPart("uint8", per=2), RowPart("float8_e4m3fn", per=16)),
    rope="bfloat16",
    layer_scale=True,
    error=0.16,
    kernels=_KERNELS,
)


@hookimpl
def attnplug_kv_formats() -> list[KVFormat]:
    return [FP8_PER_TOKEN_HEAD, NVFP4]
