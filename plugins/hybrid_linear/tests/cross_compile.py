"""Compile the kernel of a whole delta-rule layer for GPUs that may be absent.

Prints [SM, kind, shared bytes, registers of a thread, bytes spilled] of each; registers are by ptxas, for SM 90 alone.
"""

import json

from attnplug_hybrid_linear.triton_delta import _decode
from attnplug_testing.ahead import compiled, resources

SINGLE = dict.fromkeys(("rate", "bias", "norm", "states"), "*fp32")
KINDS = {**SINGLE, "slots": "*i64", "counters": "*i32", "scale": "fp32", "eps": "fp32"}
SHORT = ("rows", "conv", "conv_states", "decay", "beta", "gate", "out")
STRIDES = ("row_stride", "decay_row", "decay_head", "gate_row", "gate_head")


def decode(sm: int, by_channel: bool, dtype: str, columns: int):
    constants = {
        "HEADS": 32,
        "KEY_HEADS": 32 if by_channel else 16,
        "KEY_DIM": 128,
        "VALUE_DIM": 128,
        "WIDTH": 4,
        "TAPS": 4,
        "BY_CHANNEL": by_channel,
        "SILU": not by_channel,
        "BLOCK_K": 128,
        "WHOLE_V": 128,
        "BLOCK_V": columns,
        "OVERLAP": sm >= 90,
    }
    kinds = {**KINDS, **dict.fromkeys(SHORT, f"*{dtype}")}
    options: dict[str, object] = {"num_warps": 4, "launch_pdl": sm >= 90}
    return compiled(_decode, sm, kinds, constants, options, STRIDES)


if __name__ == "__main__":
    found = []
    for sm, by_channel, dtype, columns in (
        (80, False, "fp16", 128),
        (90, False, "bf16", 128),
        (90, True, "bf16", 128),
        (90, True, "bf16", 32),
    ):
        made = decode(sm, by_channel, dtype, columns)
        found.append([sm, by_channel, made.metadata.shared, *(resources(made) if sm == 90 else (0, 0))])
    print(json.dumps(found))
