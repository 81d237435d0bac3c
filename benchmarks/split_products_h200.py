"""Sweep over split-K configurations of products with narrow matrices on an H200, in about 90 seconds.

python benchmarks/split_products_h200.py --out benchmarks/results/split_products_h200.json
python benchmarks/split_products_h200.py --kinds plain --rows 4,8,32 --shapes o,down --out FILE
python benchmarks/split_products_h200.py --smoke            two tiny products of each kind, in Triton's interpreter

``plain`` weights are bfloat16, ``codes`` are fp8 in blocks of 128 × 128. ``present`` is the kernel that the engine uses
without ``split_gemm``, or the library. As in ``quantized_products_h200.py``, calls of one configuration follow each
other in a CUDA graph, each with its own copy of the weight, with the norm or residual that the model has there.

Each configuration is first compared with a float64 product: ``error`` is relative, by norms. ``same``: a second call
gives the same bits, and arrival counters are zero afterwards. The best sound configurations are to be entered into
``PLAIN`` and ``CODES`` of ``attnplug_engine.kernels.split_gemm``.

Kernels are compiled first, the most important ones before others, by processes that share Triton's cache. They stop at
60 % of ``--seconds``, and the sweep stops at ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from decode_models import BYTES_PER_SECOND
from decode_points import DeviceLock
from gpu_report import Report, attempt, describe
from quantized_products_h200 import COLD_BYTES, drawn, normed, timed
from torch import Tensor
from torch.nn import functional as F

from attnplug_engine.kernels.split_gemm import SplitConfig, arrival_counters, split_gemm
from attnplug_engine.quantization.fp8 import Fp8Blocks

WHAT = "products with narrow matrices by split-K configuration, µs"
PACKAGES = ("torch", "triton", "attnplug-engine")
KINDS = ("codes", "plain")
ROWS = (16, 64, 4, 8, 32)
SHAPES = {"o": (2048, 2048), "down": (2048, 8192), "qkv": (3072, 2048), "q_b": (3072, 1536), "kv_a": (2112, 2048)}
"""Rows and columns of the weights."""
NORMED = ("qkv", "q_b", "kv_a")
"""The others add a residual."""
PARTS = {1536: (2, 4, 6), 2048: (2, 4, 8), 8192: (4, 8, 16)}
"""Parts that are tried, by columns; the second one with all configurations."""
_ERROR = 0.01
"""Largest error of a sound configuration. The present kernel has more if it scales its input to fp8."""
Config = SplitConfig | None
"""None is the present kernel."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    shape: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.shape}, {self.rows}"

    @property
    def size(self) -> tuple[int, int]:
        return SHAPES.get(self.shape, (72, 512))

    def configs(self) -> list[Config]:
        few, some, many = PARTS.get(self.size[1], (2, 3, 4))
        full, padded = self.rows != 32, max(self.rows, 16)
        stages = 6 if padded == 16 else 4
        found: list[Config] = [None]
        if self.kind == "plain":
            found += [SplitConfig(64, 128, parts, 4, stages) for parts in (some, few, many)]
            found += [SplitConfig(64, 128, some, 4, stages, prefetch=32)]
            if full:
                found += [SplitConfig(64, 128, many, 4, 3), SplitConfig(64, 64, some, 4, 8)]
                found += [SplitConfig(128, 128, some, 8, 4), SplitConfig(32, 128, few, 2, stages)]
                found += [SplitConfig(64, 128, 1, 4, stages)]
            return found
        found += [SplitConfig(64, 128, parts, 4, stages) for parts in (some, few, many)]
        found += [SplitConfig(64, 128, parts, 4, stages, 16) for parts in (some, many)]
        if full:
            found += [SplitConfig(128, 128, parts, 8, 4, 16) for parts in (some, many)]
            found += [SplitConfig(64, 128, many, 4, 3, 16), SplitConfig(64, 128, some, 8, 4, 16)]
            found += [SplitConfig(32, 128, some, 2, stages, 16), SplitConfig(64, 128, 1, 4, stages, 16)]
        return found


def name(config: Config) -> str:
    if config is None:
        return "present"
    block_n, block_k, parts, warps, stages, prefetch = astuple(config)
    return f"({block_n}, {block_k}, parts={parts}, {warps}, {stages}, prefetch={prefetch})"


@dataclass(slots=True)
class Product:
    """A weight with its scales and arrival counters, and what the model fuses into its product."""

    weight: Tensor
    scales: dict[str, Any]
    counters: Tensor
    norm: tuple[Tensor, float] | None
    onto: Tensor | None
    exact: Tensor

    @classmethod
    def drawn(cls, case: Case, device: str, outputs: int | None = None) -> Product:
        outputs, width = outputs or case.size[0], case.size[1]
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        scales: dict[str, Any] = {}
        if case.kind == "codes":
            made = drawn(Fp8Blocks(), outputs, width, device)
            weight, exact = made.codes, made.dequantized(torch.float64)
            scales = {"scales": made.scales, "group": 128, "rows_per_scale": made.rows_per_scale}
        else:
            weight = torch.randn(outputs, width, device=device).to(dtype)
            exact = weight.double()
        norm = (torch.rand(width, device=device).to(dtype) + 0.5, 1e-5) if case.shape in NORMED else None
        onto = None if norm else torch.randn(case.rows, outputs, device=device).to(dtype)
        return cls(weight, scales, arrival_counters(outputs, weight.device), norm, onto, exact)

    def copy(self) -> Product:
        scales = {**self.scales, "scales": self.scales["scales"].clone()} if self.scales else {}
        return Product(self.weight.clone(), scales, self.counters.clone(), self.norm, self.onto, self.exact)

    def multiplied(self, x: Tensor, config: Config) -> Tensor:
        if isinstance(config, SplitConfig):
            return split_gemm(x, self.weight, config, self.counters, norm=self.norm, onto=self.onto, **self.scales)
        if self.scales:
            from attnplug_engine.kernels.quantized_gemm import quantized_gemm

            how = {"counters": self.counters} if config else {}
            return quantized_gemm(
                x, self.weight, form="fp8", config=config, norm=self.norm, onto=self.onto, **how, **self.scales
            )
        return self._present(x)

    def _present(self, x: Tensor) -> Tensor:
        """As ``Linear`` without arrival counters."""
        from attnplug_engine.kernels.elementwise import rms_norm
        from attnplug_engine.kernels.gemm_tiles import choose
        from attnplug_engine.kernels.skinny_gemm import skinny_gemm

        config = choose(x, self.weight, normed=self.norm is not None)
        if config is not None:
            return skinny_gemm(x, self.weight, config, norm=self.norm, onto=self.onto)
        x = x if self.norm is None else rms_norm(x, *self.norm)
        return F.linear(x, self.weight) if self.onto is None else torch.addmm(self.onto, x, self.weight.t())


def checked(product: Product, x: Tensor, config: Config, wanted: Tensor) -> dict[str, Any]:
    found = product.multiplied(x, config)
    again = product.multiplied(x, config)
    error = float((found.double() - wanted).norm() / wanted.norm())
    same = bool(torch.equal(found, again)) and not bool(product.counters.any())
    return {"config": name(config), "error": round(error, 6), "same": same}


def sound(found: dict[str, Any]) -> bool:
    return "us" in found and found["same"] and (found["error"] < _ERROR or found["config"] == name(None))


def swept(case: Case, until: Callable[[], bool]) -> dict[str, Any]:
    """Microseconds and error of each configuration, the present one first."""
    product = Product.drawn(case, "cuda")
    x = torch.randn(case.rows, case.size[1], device="cuda", dtype=torch.bfloat16)
    wanted = normed(x, product.norm).double() @ product.exact.t()
    wanted = wanted if product.onto is None else wanted + product.onto.double()
    nbytes = product.weight.nbytes + sum(each.nbytes for each in product.scales.values() if isinstance(each, Tensor))
    products = [product, *(product.copy() for _ in range(min(max(COLD_BYTES // nbytes + 1, 2), 32) - 1))]
    configs: list[dict[str, Any]] = []

    def measured(config: Config) -> dict[str, Any]:
        found = checked(product, x, config, wanted)
        us = timed([lambda one=one: one.multiplied(x, config) for one in products])
        zero = not any(bool(one.counters.any()) for one in products)
        return found | {"us": round(us, 2), "same": found["same"] and zero}

    for config in case.configs():
        if until():
            break
        configs.append({"config": name(config), **attempt(lambda config=config: measured(config))})
    best = min(filter(sound, configs), key=lambda one: one["us"], default=None)
    return {"limit_us": round(1e6 * nbytes / BYTES_PER_SECOND, 2), "configs": configs, "best": best}


def line(case: Case, found: dict[str, Any]) -> str:
    """Format a case: limit, present kernel, the six fastest configurations, and every one that is not sound."""
    if "error" in found:
        return f"{case.name:16} {found['error']}"
    present = next(iter(found["configs"]), {}).get("us")
    good = sorted(filter(sound, found["configs"]), key=lambda one: one["us"])[:6]
    bad = [f"{one['config']}: {one.get('error')} {one.get('same')}" for one in found["configs"] if not sound(one)]
    times = " | ".join(f"{one['us']} {one['config']}" for one in good)
    return f"{case.name:16} limit {found['limit_us']} present {present} | {times}" + (f" | WRONG {bad}" if bad else "")


def cases(kinds: str, shapes: str, rows: str) -> Iterator[Case]:
    for count in rows.split(","):
        for kind in kinds.split(","):
            yield from (Case(kind, shape, int(count)) for shape in shapes.split(","))


def compile_part(every: list[Case], part: int, parts: int, until: Callable[[], bool]) -> None:
    """Call every kernel of a part once, with a matrix of 128 rows unless its rows decide which. Up to 16 rows of the
    input share kernels."""
    alike: dict[Any, tuple[Case, Config]] = {}
    for case in every:
        for config in case.configs():
            least = case.rows if config is None else 16
            alike.setdefault((case.kind, case.shape, max(case.rows, least), config), (case, config))
    for case, config in list(alike.values())[part::parts]:
        if until():
            return
        product = Product.drawn(case, "cuda", 128 if config else None)
        x = torch.randn(case.rows, case.size[1], device="cuda", dtype=torch.bfloat16)
        attempt(lambda product=product, x=x, config=config: product.multiplied(x, config).sum().item())


def smoke() -> dict[str, Any]:
    """Errors of products in Triton's interpreter."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    for case in (Case(kind, "tiny", 5) for kind in KINDS):
        product, x = Product.drawn(case, "cpu"), torch.randn(5, case.size[1]).half()
        assert product.onto is not None
        wanted = x.double() @ product.exact.t() + product.onto.double()
        for config in case.configs()[1:]:
            found[f"{case.kind}, {name(config)}"] = checked(product, x, config, wanted)
    return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--lock", metavar="FILE", help="lock file: scripts compile together, measure one at a time")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--compile", metavar="PART/PARTS", help="only fill Triton's cache with a part of the kernels")
    arguments = parser.parse_args(given)
    if arguments.smoke:
        report = Report(arguments.out, {"what": WHAT})
        report.put("smoke", smoke())
        print(json.dumps(report.found))
        return
    every = list(cases(arguments.kinds, arguments.shapes, arguments.rows))
    started = time.monotonic()
    if arguments.compile:
        part, parts = map(int, arguments.compile.split("/"))
        compile_part(every, part, parts, lambda: time.monotonic() - started > 0.6 * arguments.seconds)
        return
    report, lock = Report(arguments.out, describe(WHAT, PACKAGES, arguments.commit)), DeviceLock(arguments.lock)
    parts = max((os.cpu_count() or 2) - 2, 1)
    same = ["--kinds", arguments.kinds, "--rows", arguments.rows, "--shapes", arguments.shapes]
    same += ["--seconds", str(arguments.seconds)]
    workers = [
        subprocess.Popen([sys.executable, __file__, *same, "--compile", f"{part}/{parts}"]) for part in range(parts)
    ]
    for worker in workers:
        worker.wait()
    report.put("compiled after", report.seconds)
    lock.acquire()
    end = report.seconds + 0.4 * arguments.seconds
    for number, case in enumerate(every):
        if report.seconds > end:
            report.put("left out", [each.name for each in every[number:]])
            break
        found = attempt(lambda case=case: swept(case, lambda: report.seconds > end + 5))
        report.put(case.name, found)
        print(line(case, found), flush=True)
    print(f"compiled after {report.found['compiled after']:.0f} s, all after {report.seconds:.0f} s")


if __name__ == "__main__":
    main()
