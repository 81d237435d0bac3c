"""The kernels around linear recurrences, compiled for GPUs that may be absent."""

from collections.abc import Iterator

from attnplug_engine.kernels import linear_gates
from attnplug_testing.ahead import compiled

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


def kind(argument: str) -> str:
    if argument.endswith("_row"):
        return "i32"
    return "fp32" if argument in FLOATS else "*fp32" if argument in SINGLE else "*bf16"


def facts() -> Iterator[tuple[int, str]]:
    """SM and kernel of each."""
    for sm in (80, 90):
        for name in CONSTANTS if sm == 90 else ("_gated_norm",):
            kernel = getattr(linear_gates, name)
            kinds = {argument: kind(argument) for argument in kernel.arg_names}
            compiled(kernel, sm, kinds, {**CONSTANTS[name], "EARLY": sm >= 90}, {"launch_pdl": sm >= 90})
            yield sm, name
