"""Compiles Triton kernels for GPUs that need not be there.

For scripts that ``triton_mode.compiled_by`` starts: in the process of a test kernels are interpreted, which is decided
when they are defined. To start one by hand: ``python SCRIPT``.
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
    with warnings.catch_warnings(action="ignore"), knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = _keep_resources
        return compile(made, target=GPUTarget("cuda", sm, 32), options=options)


def resources(made: Any) -> tuple[int, int]:
    """The registers of a thread, and the bytes that do not fit in them, by ptxas."""
    return made.metadata.registers, made.metadata.spilled


def _keep_resources(backend: Any = None, stages: Any = None, options: Any = None, *_: object) -> tuple[str, str]:
    """Triton's hook: what ptxas says of a kernel is kept with it, so that nobody runs ptxas once more to ask."""
    if stages is not None:

        def make_cubin(ptx: str, metadata: dict[str, object]) -> bytes:
            with redirect_stdout(StringIO()) as said, knobs.nvidia.scope():
                knobs.nvidia.dump_ptxas_log = True
                cubin = backend.make_cubin(ptx, metadata, options, backend.target.arch)
            text = said.getvalue()
            registers, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
            assert registers and spilled, text
            metadata |= {"registers": int(registers[1]), "spilled": int(spilled[1])}
            return cubin

        stages["cubin"] = make_cubin
    return "with resources", "with resources"
