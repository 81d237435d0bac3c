"""Compiles the kernels around the index for SM 90, which need not be there. Prints [name, registers, bytes spilled]."""

import json
from collections.abc import Iterator

from attnplug_flashmla.triton_index import _BLOCK, _COLUMNS, _SPAN, _place_rows, _score_keys
from support.ahead import compiled, resources

KINDS = {
    **dict.fromkeys(("weights", "scales", "scores"), "*fp32"),
    **dict.fromkeys(("table", "owner", "visible", "found"), "*i32"),
    "chosen": "*i64",
    "scale": "fp32",
}
ALIGNED = ("q_row", "q_head", "weights_row", "scores_row")


def kernels() -> Iterator[tuple[str, object]]:
    for keys, stride in (("bf16", 64 * 128), ("fp8e4nv", 64 * 132)):
        constants = {
            "HEADS": 64,
            "DIM": 128,
            "PAGE_SIZE": 64,
            "PAGE_STRIDE": stride,
            "FP8": keys != "bf16",
            "HEAD_BLOCK": 64,
            "DIM_BLOCK": 128,
            "BLOCK": _BLOCK,
            "SPAN": _SPAN,
        }
        kinds = {**KINDS, "q": "*bf16", "keys": f"*{keys}"}
        yield f"score {keys}", compiled(_score_keys, 90, kinds, constants, {"num_warps": 4}, ALIGNED)
    for name, some in (("place", True), ("place all", False)):
        constants = {"PAGE_SIZE": 64, "ANY": some, "BY_SLOTS": True, "BLOCK": _COLUMNS}
        kinds = KINDS if some else {**KINDS, "chosen": "*i32"}
        yield name, compiled(_place_rows, 90, kinds, constants, {"num_warps": 4}, ("found_row",))


if __name__ == "__main__":
    print(json.dumps([(name, *resources(made, 90)) for name, made in kernels()]))
