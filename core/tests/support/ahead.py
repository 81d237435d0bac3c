"""Compiles Triton kernels for GPUs that need not be there.

For scripts that ``triton_mode.compiled_by`` starts: in the process of a test kernels are interpreted, which is decided
when they are defined. To start one by hand: ``PYTHONPATH=core/tests python SCRIPT``.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource


def compiled(
    kernel: Any,
    sm: int,
    kinds: Mapping[str, str],
    constants: Mapping[str, object],
    options: dict[str, object],
    aligned: Collection[str] = (),
    source: Any = ASTSource,
) -> Any:
    """As the launcher would compile it: addresses, and the numbers that are ``aligned``, are multiples of 16.

    ``kinds`` are the types of arguments; the others are 32-bit integers.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    made = source(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if signature[name].startswith("*") or name in aligned
        },
    )
    with warnings.catch_warnings(action="ignore"):
        return triton.compile(made, target=GPUTarget("cuda", sm, 32), options=options)


def resources(made: Any, sm: int) -> tuple[int, int]:
    """The registers of a thread, and the bytes that do not fit in them, by ptxas."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(made.asm["ptx"])
        source.flush()
        name = "sm_90a" if sm == 90 else f"sm_{sm}"
        command = [get_ptxas(sm).path, "-v", f"--gpu-name={name}", source.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers and spilled, said
    return int(registers[1]), int(spilled[1])
