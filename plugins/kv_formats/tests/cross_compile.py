"""Compile the kernels that write rows for GPUs that may be absent: ``python cross_compile.py SM…``.

Prints [SM, format] of all.
"""

import json
import sys

from attnplug_kv_formats.triton_rows import _write, _write_pairs
from attnplug_testing import ahead

PAGE_SIZE, HEADS = 64, 8
POINTERS = {"slots": "*i64", "rope": "*bf16", "rows": "*bf16", "v_rows": "*bf16"}
FLOATS = dict.fromkeys(("divisor", "v_divisor"), "fp32")


def constants(nvfp4: bool, width: int, prefix: str = "") -> dict[str, object]:
    row, scale_bytes = (width * 9 // 16, 1) if nvfp4 else (width + 4, 4)
    strides = {"PAGE": PAGE_SIZE * HEADS * row, "SLOT": HEADS * row, "HEAD": row}
    return {
        **{f"{prefix}{name}_STRIDE": stride for name, stride in strides.items()},
        **{f"{prefix}SCALE_{name}": stride // scale_bytes for name, stride in strides.items()},
        f"{prefix}WIDTH": width,
        f"{prefix}BLOCK": 1 << (width - 1).bit_length(),
    }


def compile_all(sm: int, nvfp4: bool) -> None:
    values, scales = "*u8", "*u8" if nvfp4 else "*fp32"
    kinds = {**POINTERS, **FLOATS, "values": values, "scales": scales, "v_values": values, "v_scales": scales}
    given = {"PAGE_SIZE": PAGE_SIZE, "NVFP4": nvfp4, "EARLY": sm >= 90}
    options = {"num_warps": 1, "launch_pdl": sm >= 90}
    rope = {"ROPE_PAGE": 64 * 400, "ROPE_SLOT": 400, "ROPE": 64, "ROPE_BLOCK": 64}
    ahead.compiled(_write, sm, kinds, {**given, **constants(nvfp4, 512), **rope}, options)
    pair = {**given, **constants(nvfp4, 128), **constants(nvfp4, 80, "V_")}
    ahead.compiled(_write_pairs, sm, kinds, pair, options)


if __name__ == "__main__":
    found = []
    for sm in map(int, sys.argv[1:]):
        for nvfp4 in (False, True):
            compile_all(sm, nvfp4)
            found.append((sm, "nvfp4" if nvfp4 else "fp8_per_token_head"))
    print(json.dumps(found))
