"""Compiles the kernels around linear recurrences for GPUs that need not be there; prints [SM, kernel] of all."""

import json
import os
import warnings

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined, so before any import of them

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnplug_engine.kernels import linear_gates

HEADS = {"HEADS": 32, "WIDTH": 128, "BLOCK": 1024}
NORM = {"GROUPS": 8, "WIDTH": 512, "WEIGHT_GROUP": 512, "HEAD": 64, "SKIP": True, "GATE_FIRST": True, "SILU": True}
CONSTANTS = {
    "_delta_gates": {**HEADS, "BLOCK_HEADS": 32},
    "_time_steps": HEADS,
    "_gated_norm": {**NORM, "BLOCK": 512},
    "_sigmoid_gate": {"WIDTH": 4096, "BLOCK": 1024},
}
SINGLE = ("rate", "bias", "log_decay", "weight", "skip")
FLOATS = ("low", "high", "eps")


def compile_kernel(name: str, sm: int) -> None:
    kernel, constants = getattr(linear_gates, name), {**CONSTANTS[name], "EARLY": sm >= 90}

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument.endswith("_row"):
            return "i32"
        return "fp32" if argument in FLOATS else "*fp32" if argument in SINGLE else "*bf16"

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={argument: kind(argument) for argument in names},
        constexprs={(names.index(argument),): value for argument, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place, each in enumerate(names) if kind(each)[0] == "*"},
    )
    with warnings.catch_warnings(action="ignore"):
        triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"launch_pdl": sm >= 90})


if __name__ == "__main__":
    found = []
    for sm in (80, 90):
        for name in CONSTANTS:
            compile_kernel(name, sm)
            found.append([sm, name])
    print(json.dumps(found))
