"""Compile the engine's kernels for GPUs that may be absent, and print the findings as JSON by purpose."""

import json

import compile_experts
import compile_hisparse
import compile_invariant
import compile_kernels
import compile_linear_gates
import compile_quantized
import compile_sampler
import compile_speculation
import compile_step_io

PARTS = {
    "models": compile_kernels,
    "experts": compile_experts,
    "invariant": compile_invariant,
    "hisparse": compile_hisparse,
    "linear gates": compile_linear_gates,
    "quantized": compile_quantized,
    "sampler": compile_sampler,
    "speculation": compile_speculation,
    "steps": compile_step_io,
}

if __name__ == "__main__":
    print(json.dumps({name: list(part.facts()) for name, part in PARTS.items()}))
