"""Compiles the sampler's kernels for GPUs that need not be there; prints [SM, kernel] of each.

With ``--resources`` also the registers of a thread and the bytes spilled, by ptxas.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings

os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined, so before any import of them

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from attnplug_engine.kernels import sample

TYPES = {
    **dict.fromkeys(("logits", "temperature", "top_p", "min_p", "peaks", "scores"), "*fp32"),
    **dict.fromkeys(("top_k", "position", "peak_tokens", "drawn"), "*i32"),
    **dict.fromkeys(("seed", "chosen"), "*i64"),
}


def compiled(kernel, sm: int, constants: dict[str, object], options: dict[str, object]):
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name in TYPES or name in ("stride", "vocab")
        },
    )
    with warnings.catch_warnings(action="ignore"):
        return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def resources(made, sm: int) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(made.asm["ptx"])
        source.flush()
        name = f"sm_{sm}a" if sm == 90 else f"sm_{sm}"
        command = [get_ptxas(sm).path, "-v", f"--gpu-name={name}", source.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return ", ".join(re.findall(r"\d+ registers|\d+ bytes spill stores", said))


def main() -> None:
    found = []
    for sm in (80, 90):
        early = sm >= 90
        look = compiled(sample._look, sm, {"CHUNK": sample.CHUNK, "EARLY": early}, {"num_warps": 4})
        choose = compiled(
            sample._choose,
            sm,
            {"CHUNKS": 128, "BLOCK": sample.BLOCK, "EARLY": early},
            {"num_warps": sample.WARPS, "launch_pdl": early},
        )
        for kernel, made in (("_look", look), ("_choose", choose)):
            found.append([sm, kernel])
            if "--resources" in sys.argv:
                print(sm, kernel, resources(made, sm), file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
