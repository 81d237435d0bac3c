"""Decode steps of one request with products in several configurations, on an H200, in less than a minute.

python benchmarks/one_row_h200.py --out benchmarks/results/one_row_h200.json
python benchmarks/one_row_h200.py --models llama,llama-fp8,mla,mla-fp8 --configurations fp8
python benchmarks/one_row_h200.py --smoke                        the same code on a CPU with a tiny model

Kernels of a step overlap, so products are timed in whole steps of decode_models.py's models with ``triton_mha`` or
``triton_mla``. Each configuration has an engine of its own, one after another; the first and the last have
``skinny_gemm`` for all products, "as chosen" is what ships. ``gemm_tiles.ONE_ROW_CONFIGS`` and ``LONG_WAIT_CONFIGS``
are chosen from it, and those for fp8 codes from models ending in ``-fp8``, which have fp8 blocks of 128 × 128.
``--configurations`` times some of them, separated by |; models leave out those that they do not have. With ``fp8`` it
is all of fp8 models, and what ships for others. ``--contexts`` times other lengths than 512.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from decode_models import MODELS, limit_us, smaller
from decode_ours import decode, randomise
from decode_points import Point, Settings
from gpu_report import Report, attempt, describe
from quantized_h200 import limit_us as fp8_limit_us
from quantized_h200 import quantized

from attnplug_engine import Engine
from attnplug_engine.kernels import gemm_tiles
from attnplug_engine.kernels.gemm_tiles import GemmConfig

WHAT = "decode steps of one request, by configurations of products, µs"
PACKAGES = ("torch", "triton", "attnplug-engine", "attnplug-triton-mha", "attnplug-triton-mla")
BACKENDS = {"llama": "triton_mha", "mla": "triton_mla", "moe": "triton_mla", "hybrid": "triton_mha"}
Shapes = Mapping[tuple[int, int], GemmConfig]
Tables = tuple[Shapes, Shapes]
"""``ONE_ROW_CONFIGS`` and ``LONG_WAIT_CONFIGS``, or those for fp8 codes."""

GATE_UP, QKV, OUT, DOWN, HEAD = (16384, 2048), ((3072, 2048), (2112, 2048)), (2048, 2048), (2048, 8192), (32000, 2048)
_SKINNY_OUT = {OUT: GemmConfig(2, 2048, 2)}
_SOME = {GATE_UP: GemmConfig(4, 2048, 4, stages=1, along=2)}
_MOST = {GATE_UP: GemmConfig(2, 2048, 4, stages=3, along=2, programs=4)}
_QKV = dict.fromkeys(QKV, GemmConfig(4, 2048, 4, stages=1, along=2))
_NARROW_QKV = dict.fromkeys(QKV, GemmConfig(2, 2048, 2, stages=1, along=2))
_FOR_ALL: Mapping[str, Shapes] = {
    "registers": {},
    "output": _SKINNY_OUT,
    "qkv": _QKV,
    "gate-up, one block": _SOME | _SKINNY_OUT,
    "gate-up, one block; qkv": _SOME | _SKINNY_OUT | _QKV,
    "gate-up, one block; narrow qkv": _SOME | _SKINNY_OUT | _NARROW_QKV,
    "gate-up, several blocks": _MOST | _SKINNY_OUT,
    "gate-up, several blocks; qkv": _MOST | _SKINNY_OUT | _QKV,
    "gate-up, several blocks; narrow qkv": _MOST | _SKINNY_OUT | _NARROW_QKV,
    "gate-up, one block; down": _SOME | _SKINNY_OUT | {DOWN: GemmConfig(1, 8192, 4, stages=1, along=4)},
    "gate-up, one block; head": _SOME | _SKINNY_OUT | {HEAD: GemmConfig(4, 2048, 4, stages=3, along=2, programs=4)},
    "registers again": {},
}
"""By name, configurations by the matrix's ``(rows, columns)``; other products are ``skinny_gemm``'s."""
_FP8_SOME: Shapes = {GATE_UP: GemmConfig(8, 2048, 4, stages=1, along=2)}
_FP8_MOST: Shapes = {GATE_UP: GemmConfig(4, 2048, 4, stages=3, along=2, programs=4)}
_FP8_QKV: Shapes = dict.fromkeys(QKV, GemmConfig(4, 2048, 4, stages=1))
_FP8_FOR_ALL: Mapping[str, Shapes] = {
    "registers": {},
    "gate-up, one block": _FP8_SOME,
    "gate-up, several blocks": _FP8_MOST,
    "gate-up, one block; qkv": _FP8_SOME | _FP8_QKV,
    "gate-up, several blocks; qkv": _FP8_MOST | _FP8_QKV,
    "registers again": {},
}
NAMES = {False: ("ONE_ROW_CONFIGS", "LONG_WAIT_CONFIGS"), True: ("ONE_ROW_FP8_CONFIGS", "LONG_WAIT_FP8_CONFIGS")}
"""Tables of ``gemm_tiles`` for 16-bit weights, and for fp8 codes."""


def tables(*, fp8: bool) -> Tables:
    """Return the tables of ``gemm_tiles``."""
    one_row, long_wait = (getattr(gemm_tiles, name) for name in NAMES[fp8])
    return one_row, long_wait


def put(given: Tables, *, fp8: bool) -> None:
    """Replace the tables of ``gemm_tiles``."""
    for name, table in zip(NAMES[fp8], given, strict=True):
        setattr(gemm_tiles, name, table)


CONFIGURATIONS: Mapping[bool, Mapping[str, Tables]] = {
    fp8: {"as chosen": tables(fp8=fp8)} | {name: (found, {}) for name, found in configurations.items()}
    for fp8, configurations in ((False, _FOR_ALL), (True, _FP8_FOR_ALL))
}
"""Those of 16-bit weights, and of fp8 codes."""


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,mla", help=f"of {', '.join(BACKENDS)}, or one of them with -fp8")
    parser.add_argument("--configurations", help="separated by |, or fp8; all by default")
    parser.add_argument("--contexts", default="512", help="tokens, separated by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(given)
    found = {"what": WHAT} if arguments.smoke else describe(WHAT, PACKAGES, arguments.commit)
    report = Report(arguments.out, found)
    for model, context in product(arguments.models.split(","), map(int, arguments.contexts.split(","))):
        name, fp8 = model.removesuffix("-fp8"), model.endswith("-fp8")
        config = smaller(MODELS[name]) if arguments.smoke else MODELS[name]
        limit, steps = limit_us(config, 1, context), dict[str, Any]()
        if fp8:
            config, limit = quantized(config), fp8_limit_us(config, 1, context)
        chosen = tables(fp8=fp8)
        try:
            for each in _selected(arguments.configurations, fp8=fp8):
                put(CONFIGURATIONS[fp8][each], fp8=fp8)
                steps[each] = attempt(partial(step_us, name, config, context, smoke=arguments.smoke))
                print(f"[{report.seconds:3.0f} s] {model}, 1 x {context}, {each}: {steps[each]}", flush=True)
                key = model if context == 512 else f"{model}, 1 x {context}"
                report.put(key, {"limit_us": limit, "step_us": steps})
        finally:
            put(chosen, fp8=fp8)


def _selected(given: str | None, *, fp8: bool) -> list[str]:
    """Return the names of a model's configurations among those of ``--configurations``."""
    own = CONFIGURATIONS[fp8]
    if given is None or (given == "fp8" and fp8):
        return list(own)
    names = ["as chosen"] if given == "fp8" else given.split("|")
    if unknown := [name for name in names if not any(name in each for each in CONFIGURATIONS.values())]:
        raise SystemExit(f"no configuration {', '.join(unknown)}; there are {', '.join(own)}")
    return [name for name in names if name in own]


def step_us(model: str, config: Mapping[str, Any], context: int, *, smoke: bool) -> float:
    """Median microseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = Engine(
            folder,
            random_weights=True,
            attention_backend="torch_native" if smoke else BACKENDS[model],
            device="cpu" if smoke else "cuda",
            max_batch=1,
            context_length=context + 1536,
            chunked_prefill_size=512,
            ignore_eos=True,
            cuda_graph_batch_sizes=None if smoke else (1,),
            disable_prefill_cuda_graph=True,
        )
    randomise(engine)
    settings = Settings(trace=False, max_new_tokens=100 if smoke else 400)
    found: float = decode(engine, Point(model, 1, 40 if smoke else context), settings)["median_step_us"]
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    main()
