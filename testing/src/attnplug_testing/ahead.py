"""Ahead-of-time compilation of Triton kernels, for GPUs that the machine need not have.

Used by scripts that ``triton_mode.compiled_by`` starts. A test's own process interprets kernels, which Triton decides
when a kernel is defined. To run such a script by hand: ``python SCRIPT``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from triton import compile, knobs
from triton.backends.compiler import GPUTarget
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
    """Compile a kernel as the launcher would: pointers and the ``aligned`` integers are multiples of 16.

    ``kinds`` maps argument names to Triton types; the remaining arguments are 32-bit integers.
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
    with warnings.catch_warnings(action="ignore"), knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = _keep_resources
        return compile(made, target=GPUTarget("cuda", sm, 32), options=options)


def resources(made: Any) -> tuple[int, int]:
    """Return registers per thread and spilled bytes, as reported by ptxas."""
    return made.metadata.registers, made.metadata.spilled


def _keep_resources(backend: Any = None, stages: Any = None, options: Any = None, *_: object) -> tuple[str, str]:
    """Triton's stages hook: store ptxas' resource report in the kernel's metadata, which saves a second ptxas run."""
    if stages is not None:

        def make_cubin(ptx: str, metadata: dict[str, object]) -> bytes:
            with redirect_stdout(StringIO()) as report, knobs.nvidia.scope():
                knobs.nvidia.dump_ptxas_log = True
                cubin: bytes = backend.make_cubin(ptx, metadata, options, backend.target.arch)
            text = report.getvalue()
            registers, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
            assert registers and spilled, text
            metadata |= {"registers": int(registers[1]), "spilled": int(spilled[1])}
            return cubin

        stages["cubin"] = make_cubin
    return "with resources", "with resources"
