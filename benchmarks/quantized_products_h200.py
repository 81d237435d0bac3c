"""Sweep over tile configurations of products with quantized weights on an H200, in about 90 seconds.

python benchmarks/quantized_products_h200.py --out benchmarks/results/quantized_products_h200.json
python benchmarks/quantized_products_h200.py --forms int4,mxfp4 --rows 1,16 --out FILE
python benchmarks/quantized_products_h200.py --smoke                     one tiny product per format, on a CPU

Every configuration of ``CANDIDATES`` multiplies weights of the shapes of ``decode_models.py`` and one of 24576 × 7168.
Calls of one configuration follow each other in a CUDA graph, each with its own copy of the weight, so that none is
found in L2 and launches overlap as in a model. A call includes scaling the activations. ``share`` is the time to read
the codes and scales once at 4.2 TB/s, divided by the call's; ``error`` is the distance from a float32 product of the
decoded weight and the activations as the kernel sees them. ``best`` is to be entered into
``attnplug_engine.kernels.quantized_configs``.

Kernels are compiled first, by processes that share Triton's cache. The sweep stops after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from decode_models import BYTES_PER_SECOND
from gpu_clock import capture
from gpu_report import Report, attempt, describe

from attnplug_engine.kernels.quantized_configs import QuantizedConfig
from attnplug_engine.quantization.fp8 import Fp8Blocks
from attnplug_engine.quantization.int4 import Int4Groups
from attnplug_engine.quantization.mxfp4 import Mxfp4
from attnplug_engine.quantization.scheme import QuantizedWeight, Scheme

WHAT = "products with quantized weights by tile configuration, µs"
PACKAGES = ("torch", "triton", "sgl-deep-gemm", "attnplug-engine")
FORMS: dict[str, Callable[[], Scheme]] = {"fp8": Fp8Blocks, "int4": lambda: Int4Groups(32), "mxfp4": Mxfp4}
ROWS = (1, 16, 64, 256, 4096)
SHAPES = {
    "V3 MLP": (24576, 7168),
    "Llama qkv": (3072, 2048),
    "o": (2048, 2048),
    "gate_up": (16384, 2048),
    "down": (2048, 8192),
    "MLA q_b": (3072, 1536),
    "MoE gate_up": (21888, 2048),
}
"""Rows and columns of the weights."""
EXPERTS, CHOSEN, HIDDEN, INNER = 32, 6, 2048, 1408
"""Experts of ``decode_models``' mixture, those of a token, and their sizes."""
COLD_BYTES = 200 << 20
_REPLAYS = 7
_LARGEST_ERROR = 0.01
"""Largest relative error, by norms, of a sound configuration. bfloat16 results are off by 0.0017."""


def _tiles(rows: int, *tiles: tuple[int, int, int]) -> list[QuantizedConfig]:
    return [QuantizedConfig(rows, columns, warps, stages) for columns, warps, stages in tiles]


def _packed(rows: int, *tiles: tuple[int, int]) -> list[QuantizedConfig]:
    return [QuantizedConfig(rows, 32, 2, stages, units) for stages, units in tiles]


CANDIDATES: dict[str, Mapping[int, Sequence[QuantizedConfig]]] = {
    "fp8": {
        1: [
            *_tiles(8, (16, 1, 20), (32, 2, 20), (64, 4, 10)),
            QuantizedConfig(8, 32, 2, 20, lines=16),
        ],
        16: [
            *_tiles(16, (16, 1, 20), (32, 2, 10), (32, 2, 20), (32, 4, 12), (64, 4, 6), (64, 4, 10), (128, 4, 6)),
            QuantizedConfig(16, 32, 2, 20, lines=16),
            QuantizedConfig(16, 64, 4, 10, lines=16),
        ],
        64: _tiles(64, (32, 2, 8), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 5)),
        256: [*_tiles(64, (64, 4, 5), (128, 4, 4)), *_tiles(128, (64, 4, 4), (128, 8, 3), (128, 8, 4))],
        4096: [*_tiles(64, (128, 4, 4), (256, 8, 3)), *_tiles(128, (128, 8, 3), (128, 8, 4), (256, 8, 3))],
    },
    "int4": {
        1: _packed(8, (3, 4), (4, 4), (4, 8), (6, 8)),
        16: _packed(16, (3, 4), (4, 8), (6, 8)),
        64: _packed(64, (3, 2), (3, 4), (4, 4)),
        256: _packed(64, (3, 4), (4, 4)),
        4096: _packed(64, (3, 4)),
    },
}
CANDIDATES["mxfp4"] = CANDIDATES["int4"]
EXPERT_CANDIDATES: dict[str, Mapping[int, Sequence[QuantizedConfig]]] = {
    "fp8": {
        1: _tiles(8, (32, 2, 12), (64, 4, 5), (64, 4, 8), (128, 4, 5)),
        16: [*_tiles(8, (64, 4, 8)), *_tiles(16, (32, 2, 10), (64, 4, 6), (64, 4, 8), (128, 4, 5))],
        64: [*_tiles(16, (64, 4, 6), (128, 4, 5)), *_tiles(32, (64, 4, 6), (128, 8, 4))],
        256: [*_tiles(32, (64, 4, 6)), *_tiles(64, (64, 4, 5), (128, 8, 4))],
        4096: [*_tiles(64, (128, 4, 4)), *_tiles(128, (128, 8, 3), (128, 8, 4))],
    },
    "int4": {
        1: _packed(8, (4, 4), (4, 8)),
        16: [*_packed(8, (4, 8)), *_packed(16, (4, 4), (4, 8))],
        64: [*_packed(16, (4, 8)), *_packed(32, (4, 4))],
        256: _packed(64, (3, 4), (4, 4)),
        4096: _packed(64, (3, 4)),
    },
}
"""The same for experts, by tokens."""
EXPERT_CANDIDATES["mxfp4"] = EXPERT_CANDIDATES["int4"]


@dataclass(frozen=True, slots=True)
class Case:
    form: str
    shape: str
    rows: int

    @property
    def configs(self) -> Sequence[QuantizedConfig]:
        return CANDIDATES[self.form][self.rows]

    @property
    def width(self) -> int:
        return SHAPES[self.shape][1]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shapes", default=",".join([*SHAPES, "experts"]))
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--compile", metavar="PART/PARTS", help="only fill Triton's cache with a part of the kernels")
    arguments = parser.parse_args(given)
    if arguments.smoke:
        report = Report(arguments.out, {"what": WHAT})
        for form in FORMS:
            report.put(form, _smoke(form))
        print(json.dumps(report.found))
        return
    cases = list(_cases(arguments.forms.split(","), arguments.shapes.split(","), arguments.rows.split(",")))
    if arguments.compile:
        part, parts = map(int, arguments.compile.split("/"))
        _compile(cases, part, parts)
        return
    report = Report(arguments.out, describe(WHAT, PACKAGES, arguments.commit))
    parts = max((os.cpu_count() or 2) - 2, 1)
    same = ["--forms", arguments.forms, "--rows", arguments.rows, "--shapes", arguments.shapes]
    workers = [
        subprocess.Popen([sys.executable, __file__, *same, "--compile", f"{part}/{parts}"]) for part in range(parts)
    ]
    for worker in workers:
        worker.wait()
    report.put("compiled after", report.seconds)
    for number, case in enumerate(cases):
        if report.seconds > arguments.seconds:
            report.put("left out", [asdict(each) for each in cases[number:]])
            break
        name = f"{case.form}, {case.shape}, {case.rows}"
        measure = swept_experts if case.shape == "experts" else swept
        report.put(name, attempt(lambda measure=measure, case=case: measure(case)))
        found = report.found[name]
        print(f"{name:28}", found.get("best") or found.get("error"), flush=True)


def _cases(forms: list[str], shapes: list[str], rows: list[str]) -> Iterator[Case]:
    """Those of the goals first: 24576 × 7168, then the dense models."""
    for shape in shapes:
        for form in forms:
            if form == "fp8" or shape in ("V3 MLP", "gate_up", "down", "experts"):
                brief = shape == "MLA q_b" or (form != "fp8" and shape in ("gate_up", "down"))
                yield from (Case(form, shape, count) for count in map(int, rows) if count <= 16 or not brief)


def swept(case: Case) -> dict[str, Any]:
    """Microseconds, share of the byte limit and error of each configuration, and of a bfloat16 weight."""
    weight, x = _weight(case), _activations(case)
    copies = min(max(COLD_BYTES // weight.nbytes + 1, 2), 32)
    weights = [weight, *(_copy(weight) for _ in range(copies - 1))]
    limit = 1e6 * weight.nbytes / BYTES_PER_SECOND
    exact = weight.dequantized(torch.float32)
    found: dict[str, Any] = {"limit_us": round(limit, 2), "configs": []}
    plain = exact.bfloat16()
    plains = [plain, *(plain.clone() for _ in range(copies - 1))]
    found["bfloat16_us"] = round(_timed([lambda one=one: x @ one.t() for one in plains]), 2)
    del plains
    wanted: dict[bool, torch.Tensor] = {}
    for config in case.configs:
        scaled = case.form == "fp8"
        if scaled not in wanted:
            wanted[scaled] = (_scaled(x) if scaled else x.float()) @ exact.t()
        right = wanted[scaled]
        found["configs"].append(attempt(lambda config=config, right=right: _measured(config, x, weights, right, limit)))
    sound = [one for one in found["configs"] if "us" in one and one["error"] < _LARGEST_ERROR]
    found["best"] = min(sound, key=lambda one: one["us"], default=None)
    return found


def _measured(
    config: QuantizedConfig, x: torch.Tensor, weights: list[QuantizedWeight], wanted: torch.Tensor, limit: float
) -> dict[str, Any]:
    found = multiplied(x, weights[0], config).float()
    error = float((found - wanted).norm() / wanted.norm())
    us = _timed([lambda one=one: multiplied(x, one, config) for one in weights])
    return {"config": repr(config), "us": round(us, 2), "share": round(limit / us, 3), "error": round(error, 6)}


def multiplied(x: torch.Tensor, weight: QuantizedWeight, config: QuantizedConfig) -> torch.Tensor:
    """Multiply with one configuration."""
    from attnplug_engine.kernels.quantized_configs import fitting
    from attnplug_engine.kernels.quantized_gemm import quantized_gemm

    scheme, options = weight.scheme, {"group": weight.scheme.group, "rows_per_scale": weight.rows_per_scale}
    config = fitting(config, "scaled" if scheme.kernel == "fp8" else scheme.kernel, x.device)
    return quantized_gemm(x, weight.codes, weight.scales, form=scheme.kernel, config=config, **options)


def swept_experts(case: Case) -> dict[str, Any]:
    """The same for a mixture of experts. The limit counts the experts that are chosen; ``error`` is the distance from
    the first configuration's result."""
    from attnplug_engine.kernels.quantized_configs import fitting
    from attnplug_engine.kernels.quantized_experts import quantized_experts

    x = torch.randn(case.rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(case.rows, EXPERTS, device="cuda").topk(CHOSEN).indices.int()
    shares = torch.rand(case.rows, CHOSEN, device="cuda")
    copies = [_experts(case.form) for _ in range(3)]
    scheme, used = copies[0][0].scheme, len(ids.unique()) / EXPERTS
    limit = 1e6 * used * sum(weight.nbytes for weight in copies[0]) / BYTES_PER_SECOND

    def call(weights: tuple[QuantizedWeight, QuantizedWeight], config: QuantizedConfig) -> torch.Tensor:
        return quantized_experts(
            x, ids, shares, *weights, form=scheme.kernel, group=scheme.group, gated=True, config=config
        )

    found: dict[str, Any] = {"limit_us": round(limit, 2), "configs": []}
    wanted: torch.Tensor | None = None
    for config in EXPERT_CANDIDATES[case.form][case.rows]:
        fitted = fitting(config, "scaled" if case.form == "fp8" else case.form, x.device)
        own = call(copies[0], fitted).float()
        wanted = own if wanted is None else wanted
        error = float((own - wanted).norm() / wanted.norm())
        us = _timed([lambda weights=weights, fitted=fitted: call(weights, fitted) for weights in copies])
        found["configs"].append(
            {"config": repr(config), "us": round(us, 2), "share": round(limit / us, 3), "error": round(error, 6)}
        )
    sound = [one for one in found["configs"] if one["error"] < _LARGEST_ERROR]
    found["best"] = min(sound, key=lambda one: one["us"], default=None)
    return found


def _experts(form: str) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Return one expert's random weights, once for each expert."""
    scheme = FORMS[form]()

    def stacked(outputs: int, width: int) -> QuantizedWeight:
        one = drawn(scheme, outputs, width, "cuda")
        codes, scales = (
            part.expand(EXPERTS, *part.shape).contiguous() for part in (one.codes.view(torch.uint8), one.scales)
        )
        return QuantizedWeight(scheme, codes.view(scheme.code_dtype), scales, scheme.rows_per_scale)

    return stacked(2 * INNER, HIDDEN), stacked(HIDDEN, INNER)


def _timed(calls: list[Callable[[], torch.Tensor]]) -> float:
    """Microseconds of a call: of a graph of all of them, after a replay that is not timed."""
    graph, _ = capture(lambda: [call() for call in calls][-1])
    times = []
    for _ in range(_REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    return statistics.median(times[1:])


def _scaled(x: torch.Tensor) -> torch.Tensor:
    """Activations as they are after scaling to fp8."""
    from attnplug_engine.kernels.scaled_rows import scale_rows

    codes, scales = scale_rows(x)
    return codes.float() * scales.repeat_interleave(128, 1)[:, : x.shape[1]]


def _weight(case: Case) -> QuantizedWeight:
    outputs, width = SHAPES[case.shape]
    return drawn(FORMS[case.form](), outputs, width, "cuda")


def drawn(scheme: Scheme, outputs: int, width: int, device: str) -> QuantizedWeight:
    """Return a random weight."""
    tensors = scheme.quantize(torch.randn(outputs, width, device=device))
    (scales,) = (tensor for name, tensor in tensors.items() if "scale" in name)
    return QuantizedWeight(scheme, tensors[scheme.code_name].contiguous(), scales.contiguous(), scheme.rows_per_scale)


def _copy(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(weight.scheme, weight.codes.clone(), weight.scales.clone(), weight.rows_per_scale)


def _activations(case: Case) -> torch.Tensor:
    return torch.randn(case.rows, case.width, device="cuda", dtype=torch.bfloat16)


def _compile(cases: list[Case], part: int, parts: int) -> None:
    """Call every kernel of a part once. Matrices with the same number of columns share kernels."""
    mixtures = [case for case in cases if case.shape == "experts"]
    products = [case for case in cases if case.shape != "experts"]
    kernels = {(case.form, case.width, case.rows, config): None for case in products for config in case.configs}
    for form, width, rows, config in list(kernels)[part::parts]:
        weight = drawn(FORMS[form](), 256, width, "cuda")
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        attempt(lambda config=config, x=x, weight=weight: multiplied(x, weight, config).sum().item())
    for case in mixtures[part::parts]:
        attempt(lambda case=case: swept_experts(case))


def _smoke(form: str) -> dict[str, Any]:
    scheme = FORMS[form]()
    weight, x = drawn(scheme, 256, 256, "cpu"), torch.randn(3, 256)
    wanted = x @ weight.dequantized(torch.float32).t()
    found = scheme.multiply(x, weight)
    return {"configs": sum(map(len, CANDIDATES[form].values())), "error": float((found - wanted).norm())}


if __name__ == "__main__":
    main()
