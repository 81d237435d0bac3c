"""Compile the kernels of ``benchmarks/decode_chain_kernels.py`` for SM 90, also without such a GPU, and print facts as
JSON."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from decode_chain_kernels import _PIECES, HELD, MODES, OWN, _early_skinny_gemm, _early_streamed_gemm, _fetch

from attnplug_engine.kernels.gemm_tiles import STREAMED, choose_few
from attnplug_testing import ahead

POINTERS = dict.fromkeys(("out", "x", "weight", "bias", "onto", "gain"), "*bf16")
WORDS = dict.fromkeys(("first", "then", "sums"), "*i32")
BULK = {"EARLY": True, "PIECES": 128, "MODE": MODES["bulk"].value}


def compiled(kernel: Any, constants: dict[str, object], warps: int, **types: str) -> Any:
    kinds = {**POINTERS, **WORDS, "eps": "fp32", **types}
    strides = [name for name in kernel.arg_names if name.endswith("stride") or name == "upper"]
    return ahead.compiled(kernel, 90, kinds, constants, {"num_warps": warps, "launch_pdl": True}, strides)


def streamed(config: Any, *, gated: bool, held: int = 0, own: int = 0, fetches: bool = False) -> Any:
    shape = {"K": 2048, "ROWS": 16, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.stages}
    early = {"HELD": held, "OWN": own, "FETCHES": fetches, "GATED": gated, "ONTO": not gated}
    return compiled(_early_streamed_gemm, {**shape, **early, **BULK}, config.warps)


def kernels() -> Iterator[tuple[str, Any]]:
    for mode, number in MODES.items():
        yield f"fetch, {mode}", compiled(_fetch, {"PIECES": _PIECES[mode], "MODE": number.value}, 4)
    few = choose_few(2048, 2048)
    shape = {"K": 2048, "ROWS": 1, "BLOCK_N": few.block_n, "BLOCK_K": few.block_k, "BFLOAT16": True, "ONTO": True}
    rest = dict.fromkeys(("GATED", "NORM", "BIAS"), False)
    yield "skinny", compiled(_early_skinny_gemm, {**shape, **rest, **BULK}, few.warps, x="*i32", weight="*i32")
    yield "streamed, fetches", streamed(STREAMED, gated=False, fetches=True)
    for gated, all_held in HELD.items():
        for held, config in all_held:
            yield f"streamed, held {held}, gated {gated}", streamed(config, gated=gated, held=held)
    for gated, (owns, config) in OWN.items():
        for own in owns:
            yield f"streamed, own {own}, gated {gated}", streamed(config, gated=gated, own=own)


def facts() -> Iterator[dict[str, object]]:
    for name, made in kernels():
        early, _, late = made.asm["ptx"].partition("griddepcontrol.wait")
        yield {
            "kernel": name,
            "loads": len(re.findall(r"\b(?:ld\.global|cp\.async\.c[ag])", early)),
            "prefetches": len(re.findall(r"\bprefetch\.L2\.global|\bprefetch\.global\.L2", early)),
            "stores": len(re.findall(r"\bst\.global", early)) if late else 0,
            "registers": ahead.resources(made)[0],
            "spilled": ahead.resources(made)[1],
            "shared": int(made.metadata.shared),
        }


if __name__ == "__main__":
    print(json.dumps(list(facts())))
