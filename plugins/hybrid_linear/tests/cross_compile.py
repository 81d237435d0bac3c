"""Compiles the kernel of a whole delta-rule layer for GPUs that need not be there.

Prints [SM, kind, shared bytes, registers of a thread, bytes spilled] of each; registers are by ptxas, for SM 90 alone.
"""

import json
import os
import re
import subprocess
import tempfile
import warnings

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined, so before any import of them

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attnplug_hybrid_linear.triton_delta import _decode

SINGLE = dict.fromkeys(("rate", "bias", "norm", "states"), "*fp32")
KINDS = {**SINGLE, "slots": "*i64", "counters": "*i32", "scale": "fp32", "eps": "fp32"}
SHORT = ("rows", "conv", "conv_states", "decay", "beta", "gate", "out")
STRIDES = ("row_stride", "decay_row", "decay_head", "gate_row", "gate_head")


def compiled(sm: int, by_channel: bool, dtype: str, columns: int):
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
    types = {**KINDS, **dict.fromkeys(SHORT, f"*{dtype}"), **dict.fromkeys(constants, "constexpr")}
    names = _decode.arg_names
    source = ASTSource(
        fn=_decode,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if types.get(name, "").startswith("*") or name in STRIDES
        },
    )
    options = {"num_warps": 4, "launch_pdl": sm >= 90}
    with warnings.catch_warnings(action="ignore"):
        return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def resources(made) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(made.asm["ptx"])
        source.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers and spilled, said
    return int(registers[1]), int(spilled[1])


if __name__ == "__main__":
    found = []
    for sm, by_channel, dtype, columns in (
        (80, False, "fp16", 128),
        (90, False, "bf16", 128),
        (90, True, "bf16", 128),
        (90, True, "bf16", 32),
    ):
        made = compiled(sm, by_channel, dtype, columns)
        found.append([sm, by_channel, made.metadata.shared, *(resources(made) if sm == 90 else (0, 0))])
    print(json.dumps(found))
