"""Compiles the attention kernel for GPUs that need not be there, and prints the shared memory it takes for each.

python cross_compile.py '[{"sm": …, "cut": CONFIGURATION, "q": TYPE, "cache": TYPE}, …]'
"""

import json
import os
import sys
import warnings

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined, so before any import of them

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnplug_triton_mla.triton_attention import _attend

RANK, ROPE, PAGE = 512, 64, 64
POINTERS = {
    **dict.fromkeys(("lse", "partials", "partial_lse"), "*fp32"),
    **dict.fromkeys(("page_table", "counters", "numbers"), "*i32"),
    "scale": "fp32",
    "out_scale": "fp32",
}


def shared_bytes(sm: int, cut: dict[str, object], q: str, cache: str) -> int:
    constants = {
        "table_column": 1,
        "HEADS": 16,
        "RANK": RANK,
        "ROPE": ROPE,
        "PAGE_SIZE": PAGE,
        "PAGE_STRIDE": PAGE * (RANK + ROPE),
        "SLOT_STRIDE": RANK + ROPE,
        "TILE": cut["tile"],
        "STEP": cut["step"],
        "INVARIANT": False,
        "MERGE_COLUMNS": cut["merge_columns"] if cut["merge"] == "last" else 0,
        "LSE": True,
        "OVERLAP": cut["overlap"],
    }
    types = {**POINTERS, "q": f"*{q}", "out": f"*{q}", "cache": f"*{cache}"}
    names = _attend.arg_names
    source = ASTSource(
        fn=_attend,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        # As the launcher finds them: memory and strides of rows are multiples of 16.
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if types.get(name, "").startswith("*") or name in ("q_row", "q_head")
        },
    )
    options = {"num_warps": cut["warps"], "num_stages": cut["stages"]}
    with warnings.catch_warnings(action="ignore"):
        made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return int(made.metadata.shared)


if __name__ == "__main__":
    print(json.dumps([shared_bytes(**case) for case in json.loads(sys.argv[1])]))
