"""Sweep over tile configurations of products with quantized weights on an H200, in about 90 seconds.

python benchmarks/quantized_products_h200.py --out benchmarks/results/quantized_products_h200.json        fp8
python benchmarks/quantized_products_h200.py --forms int4,mxfp4 --rows 1,16 --out FILE
python benchmarks/quantized_products_h200.py --smoke                     one tiny product per format, on a CPU

Every configuration of ``CANDIDATES`` multiplies weights of the shapes of ``decode_models.py`` and one of 24576 × 7168.
Calls of one configuration follow each other in a CUDA graph, each with its own copy of the weight, so that none is
found in L2 and launches overlap as in a model. A call includes scaling the activations, and the norm and gate that the
model has there (``NORMED``, ``GATED``). ``share`` is the time to read the codes and scales once at 4.2 TB/s, divided by
the call's; ``error`` is the distance from a float32 product of the decoded weight and the activations as the kernel
sees them. ``best`` is to be entered into ``attnplug_engine.kernels.quantized_configs``; configurations of
``skinny_fp8_gemm`` (``FEW_ROWS``), which are for one row, into ``FEW_ROW_FP8_CONFIGS`` of ``gemm_tiles``.

Kernels are compiled first, by processes that share Triton's cache. The sweep stops after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from torch.nn import functional as F

from attnplug_engine.kernels.gemm_tiles import GemmConfig
from attnplug_engine.kernels.quantized_configs import SHORT, QuantizedConfig
from attnplug_engine.quantization.fp8 import Fp8Blocks
from attnplug_engine.quantization.int4 import Int4Groups
from attnplug_engine.quantization.mxfp4 import Mxfp4
from attnplug_engine.quantization.scheme import QuantizedWeight, Scheme

WHAT = "products with quantized weights by tile configuration, µs"
PACKAGES = ("torch", "triton", "sgl-deep-gemm", "attnplug-engine")
FORMS: dict[str, Callable[[], Scheme]] = {"fp8": Fp8Blocks, "int4": lambda: Int4Groups(32), "mxfp4": Mxfp4}
ROWS = (1, 16, 64, 256)
SHAPES = {
    "V3 MLP": (24576, 7168),
    "gate_up": (16384, 2048),
    "o": (2048, 2048),
    "Llama qkv": (3072, 2048),
    "down": (2048, 8192),
    "MoE gate_up": (21888, 2048),
    "MLA q_b": (3072, 1536),
    "MLA kv_a": (2112, 2048),
}
"""Rows and columns of the weights, the most important first."""
NORMED = ("gate_up", "Llama qkv", "MoE gate_up", "MLA kv_a")
GATED = ("gate_up", "MoE gate_up")
EXPERTS, CHOSEN, HIDDEN, INNER = 32, 6, 2048, 1408
"""Experts of ``decode_models``' mixture, those of a token, and their sizes."""
COLD_BYTES = 200 << 20
_REPLAYS = 7
_LARGEST_ERROR = 0.01
"""Largest relative error, by norms, of a sound configuration. bfloat16 results are off by 0.0017."""


def _tiles(rows: int, *tiles: tuple[int, int, int], lines: int = 0) -> list[QuantizedConfig]:
    return [QuantizedConfig(rows, columns, warps, stages, lines=lines) for columns, warps, stages in tiles]


def _packed(rows: int, *tiles: tuple[int, int]) -> list[QuantizedConfig]:
    return [QuantizedConfig(rows, 32, 2, stages, units) for stages, units in tiles]


CANDIDATES: dict[str, Mapping[int, Sequence[QuantizedConfig]]] = {
    "fp8": {
        1: [
            *_tiles(8, (32, 2, 20), lines=16),
            *_tiles(8, (64, 4, 6)),
        ],
        16: [
            *_tiles(16, (32, 2, 20), lines=16),
            *_tiles(16, (64, 4, 6), (128, 4, 6), (128, 8, 6)),
        ],
        64: _tiles(64, (32, 2, 8), (64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 8, 4)),
        256: [*_tiles(64, (128, 4, 4), (128, 8, 4), (256, 8, 4)), *_tiles(128, (128, 8, 3), (128, 8, 4))],
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


def _few(*tiles: tuple[int, int, int]) -> list[GemmConfig]:
    return [GemmConfig(*tile) for tile in tiles]


_SHORT_ROWS = _few((8, 2048, 2), (8, 2048, 4), (4, 2048, 1), (4, 2048, 2), (4, 2048, 4), (2, 2048, 1), (16, 2048, 4))
_SHORT_GATED = _few((4, 2048, 2), (4, 2048, 4), (2, 2048, 1), (2, 2048, 2), (2, 2048, 4), (1, 2048, 1), (8, 2048, 4))
FEW_ROWS: Mapping[str, Sequence[GemmConfig]] = {
    "V3 MLP": _few((4, 8192, 4), (4, 8192, 8), (2, 8192, 2), (2, 8192, 4), (8, 1024, 2), (8, 4096, 4), (8, 4096, 8)),
    "gate_up": _SHORT_GATED,
    "o": _SHORT_ROWS,
    "Llama qkv": _SHORT_ROWS,
    "down": _few((4, 8192, 4), (4, 8192, 8), (2, 8192, 2), (2, 8192, 4), (2, 8192, 8), (8, 8192, 8), (8, 2048, 4)),
    "MoE gate_up": _SHORT_GATED,
    "MLA q_b": _SHORT_ROWS,
    "MLA kv_a": _SHORT_ROWS,
}
"""Configurations of ``skinny_fp8_gemm`` by shape: matrix rows (of gate and of up), columns, warps. A warp loads
512 columns of a row at once; warps without any would move codes through shared memory."""
TILED = [GemmConfig(16, columns, warps, tiles=True) for columns, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8))]
"""Configurations of ``tiled_fp8_gemm``."""
EXPERT_CANDIDATES: dict[str, Mapping[int, Sequence[QuantizedConfig]]] = {
    "fp8": {
        1: _tiles(8, (64, 4, 4), (64, 4, 6)),
        16: [*_tiles(8, (64, 4, 6)), *_tiles(16, (64, 4, 6))],
        64: [*_tiles(16, (64, 4, 6)), *_tiles(32, (64, 4, 5))],
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


Config = QuantizedConfig | GemmConfig


@dataclass(frozen=True, slots=True)
class Case:
    form: str
    shape: str
    rows: int

    @property
    def configs(self) -> Sequence[Config]:
        if self.shape == "experts":
            return EXPERT_CANDIDATES[self.form][self.rows]
        own: Sequence[GemmConfig] = ()
        if self.form == "fp8" and self.rows == 1:
            own = FEW_ROWS[self.shape]
        elif self.form == "fp8" and self.rows == 16 and SHAPES[self.shape][0] <= SHORT:
            own = TILED
        return [*own, *CANDIDATES[self.form][self.rows]]

    @property
    def width(self) -> int:
        return SHAPES[self.shape][1]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default="fp8")
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
        print(_line(name, report.found[name]), flush=True)


def _cases(forms: list[str], shapes: list[str], rows: list[str]) -> Iterator[Case]:
    """Cases of a few rows first, and of more than 64 rows for some shapes only."""
    for counts in (range(17), range(17, 65), range(65, 1 << 20)):
        for shape in shapes:
            for form in forms:
                often = shape in ("V3 MLP", "gate_up", "experts") or (shape == "down" and counts[-1] <= 16)
                if often or (form == "fp8" and counts[-1] <= 64):
                    yield from (Case(form, shape, count) for count in map(int, rows) if count in counts)


def _line(name: str, found: dict[str, Any]) -> str:
    """Format a case: limit, bfloat16, and each configuration's microseconds, the fastest first.

    Configurations are their fields without names: rows, columns, warps, stages, units, lines. ``few`` and ``tiled`` are
    those of ``FEW_ROWS`` and ``TILED``: matrix rows, columns, warps.
    """
    if "error" in found:
        return f"{name:24} {found['error']}"
    each = sorted(found["configs"], key=lambda one: one.get("us", 1e9))
    times = " ".join(f"{one['config']}: {one['us']}," if "us" in one else one["error"] for one in each)
    share = found["best"] and found["best"]["share"]
    times = re.sub(r"GemmConfig(.*?), tiles=False, stages=0", r"few\1", times)
    times = re.sub(r"GemmConfig(.*?), tiles=True, stages=0", r"tiled\1", times)
    times = re.sub(r"QuantizedConfig|\w+=(?=\d)", "", times)
    return f"{name:24} limit {found['limit_us']} bfloat16 {found.get('bfloat16_us')} share {share} | {times}"


def swept(case: Case) -> dict[str, Any]:
    """Microseconds, share of the byte limit and error of each configuration, and of a bfloat16 weight."""
    weight, x = _weight(case), _activations(case)
    fused = _fused(case.shape, case.width)
    copies = min(max(COLD_BYTES // weight.nbytes + 1, 2), 32)
    weights = [weight, *(_copy(weight) for _ in range(copies - 1))]
    limit = 1e6 * weight.nbytes / BYTES_PER_SECOND
    exact = weight.dequantized(torch.float32)
    found: dict[str, Any] = {"limit_us": round(limit, 2), "configs": []}
    plain = exact.bfloat16()
    plains = [plain, *(plain.clone() for _ in range(copies - 1))]
    found["bfloat16_us"] = round(timed([lambda one=one: x @ one.t() for one in plains]), 2)
    del plains
    seen = {True: normed(x, fused.get("norm"))}
    seen[False] = _scaled(x, fused.get("norm")) if case.form == "fp8" else seen[True]
    wanted = {key: weight.scheme.finish(one @ exact.t(), None, case.shape in GATED, None) for key, one in seen.items()}
    for config in case.configs:
        expected = wanted[isinstance(config, GemmConfig)]
        found["configs"].append(
            attempt(lambda config=config, expected=expected: _measured(config, x, weights, expected, limit, fused))
        )
    sound = [one for one in found["configs"] if "us" in one and one["error"] < _LARGEST_ERROR]
    found["best"] = min(sound, key=lambda one: one["us"], default=None)
    return found


def _measured(
    config: Config,
    x: torch.Tensor,
    weights: list[QuantizedWeight],
    wanted: torch.Tensor,
    limit: float,
    fused: Mapping[str, Any],
) -> dict[str, Any]:
    found = multiplied(x, weights[0], config, fused).float()
    error = float((found - wanted).norm() / wanted.norm())
    us = timed([lambda one=one: multiplied(x, one, config, fused) for one in weights])
    return {"config": repr(config), "us": round(us, 2), "share": round(limit / us, 3), "error": round(error, 6)}


def _fused(shape: str, width: int) -> dict[str, Any]:
    """Return the norm and gate of a shape, as arguments of ``quantized_gemm``."""
    norm = (torch.rand(width, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5)
    return ({"norm": norm} if shape in NORMED else {}) | ({"gated": True} if shape in GATED else {})


def multiplied(x: torch.Tensor, weight: QuantizedWeight, config: Config, fused: Mapping[str, Any]) -> torch.Tensor:
    """Multiply with one configuration."""
    from attnplug_engine.kernels.quantized_configs import fitting
    from attnplug_engine.kernels.quantized_gemm import quantized_gemm

    scheme, options = weight.scheme, {"group": weight.scheme.group, "rows_per_scale": weight.rows_per_scale}
    if isinstance(config, QuantizedConfig):
        config = fitting(config, "scaled" if scheme.kernel == "fp8" else scheme.kernel, x.device)
    return quantized_gemm(x, weight.codes, weight.scales, form=scheme.kernel, config=config, **options, **fused)


def swept_experts(case: Case) -> dict[str, Any]:
    """The same for a mixture of experts. The limit counts the experts that are chosen; ``error`` is the distance from
    the first configuration's result."""
    call, used = _mixture(case)
    copies = [_experts(case.form) for _ in range(3)]
    limit = 1e6 * used / EXPERTS * sum(weight.nbytes for weight in copies[0]) / BYTES_PER_SECOND
    found: dict[str, Any] = {"limit_us": round(limit, 2), "configs": []}
    wanted: torch.Tensor | None = None
    for config in case.configs:
        own = call(copies[0], config).float()
        wanted = own if wanted is None else wanted
        error = float((own - wanted).norm() / wanted.norm())
        us = timed([lambda weights=weights, config=config: call(weights, config) for weights in copies])
        found["configs"].append(
            {"config": repr(config), "us": round(us, 2), "share": round(limit / us, 3), "error": round(error, 6)}
        )
    sound = [one for one in found["configs"] if one["error"] < _LARGEST_ERROR]
    found["best"] = min(sound, key=lambda one: one["us"], default=None)
    return found


Pair = tuple[QuantizedWeight, QuantizedWeight]


def _mixture(case: Case) -> tuple[Callable[[Pair, QuantizedConfig], torch.Tensor], int]:
    """Return a function that calls the experts of random tokens, and the number of experts that they choose."""
    from attnplug_engine.kernels.quantized_configs import fitting
    from attnplug_engine.kernels.quantized_experts import quantized_experts

    x = torch.randn(case.rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(case.rows, EXPERTS, device="cuda").topk(CHOSEN).indices.int()
    shares = torch.rand(case.rows, CHOSEN, device="cuda")

    def call(weights: Pair, config: QuantizedConfig) -> torch.Tensor:
        scheme = weights[0].scheme
        fitted = fitting(config, "scaled" if case.form == "fp8" else case.form, x.device)
        return quantized_experts(
            x, ids, shares, *weights, form=scheme.kernel, group=scheme.group, gated=True, config=fitted
        )

    return call, len(ids.unique())


def _experts(form: str) -> Pair:
    """Return one expert's random weights, once for each expert."""
    scheme = FORMS[form]()

    def stacked(outputs: int, width: int) -> QuantizedWeight:
        one = drawn(scheme, outputs, width, "cuda")
        codes, scales = (
            part.expand(EXPERTS, *part.shape).contiguous() for part in (one.codes.view(torch.uint8), one.scales)
        )
        return QuantizedWeight(scheme, codes.view(scheme.code_dtype), scales, scheme.rows_per_scale)

    return stacked(2 * INNER, HIDDEN), stacked(HIDDEN, INNER)


def timed(calls: list[Callable[[], torch.Tensor]]) -> float:
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


def normed(x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """Activations in float32 after their norm."""
    return x.float() if norm is None else F.rms_norm(x.float(), (x.shape[1],), norm[0].float(), norm[1])


def _scaled(x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """Activations after their norm, as they are after scaling to fp8."""
    from attnplug_engine.kernels.scaled_rows import scale_rows

    codes, scales = scale_rows(x, norm)
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
    """Call every kernel of a part once. Matrices with the same number of columns, norm and gate share kernels."""
    alike = {
        (case.shape if case.shape == "experts" else (case.width, case.shape in NORMED, case.shape in GATED),
         case.form, case.rows, config): case
        for case in cases for config in case.configs
    }  # fmt: skip
    for (*_, config), case in list(alike.items())[part::parts]:
        attempt(lambda config=config, case=case: _call(case, config).sum().item())


def _call(case: Case, config: Config) -> torch.Tensor:
    """Call a configuration's kernels, for a matrix of 256 rows."""
    if case.shape == "experts":
        return _mixture(case)[0](_experts(case.form), config)
    weight = drawn(FORMS[case.form](), 256, case.width, "cuda")
    return multiplied(_activations(case), weight, config, _fused(case.shape, case.width))


def _smoke(form: str) -> dict[str, Any]:
    scheme = FORMS[form]()
    weight, x = drawn(scheme, 256, 256, "cpu"), torch.randn(3, 256)
    wanted = x @ weight.dequantized(torch.float32).t()
    found = scheme.multiply(x, weight)
    return {"configs": sum(map(len, CANDIDATES[form].values())), "error": float((found - wanted).norm())}


if __name__ == "__main__":
    main()
