"""KV formats on an H200: one decode layer in a CUDA graph, and the error of attention, by format.

``layer_us`` is the write of new rows and attention; ``attend_us`` is attention alone. Calls in a graph cycle over
enough layers that none finds its rows in L2. Formats alternate within a run, and only ratios within one run count.
``ratio`` is a format's time divided by bfloat16's.

``errors`` compare attention with float64 over the rows before they were stored, so they contain the format's error: for
normally distributed keys, and for keys with large channels (1 in 32, 30 times as large) and large tokens (1 in 64, 8
times). Scales per layer are calibrated by the largest magnitude, except for ``float8_e4m3fn, scale 1``.

``--sweep`` measures kernel configurations of triton_mha or triton_mla instead, one line each: the time of attention,
and the error of the first request against float64 over the rows as the format reads them back. ``--smoke`` runs a tiny
case on a CPU with torch_native.
"""

from __future__ import annotations

import argparse
import gc
import math
import pkgutil
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from gpu_clock import capture, device_us
from gpu_report import Report, attempt, describe
from torch import Tensor

from attnplug import (
    AttentionBackend,
    AttentionKind,
    ForwardBatch,
    ForwardMode,
    Geometry,
    KVFormat,
    LayerSpec,
    MHAPool,
    MLAPool,
    ModelSpec,
    Role,
)
from attnplug.contract.batch import BatchPlan
from attnplug.declare.kv_format import BUILT_IN
from attnplug.host import HostContext, KVPools, Limits, MLADims, WorkspaceOwner, load_registry

Key = TypeVar("Key", bound=Hashable)
WHAT = "decode of one layer in a CUDA graph by KV format, µs; pages of 64, bf16 queries; medians"
PACKAGES = ("torch", "triton", "attnplug", "attnplug-kv-formats", "attnplug-triton-mha", "attnplug-triton-mla")
FORMATS = ("bfloat16", "float8_e4m3fn", "fp8_per_token_head", "nvfp4")
LARGEST = {"float8_e4m3fn": 448.0, "nvfp4": 448.0 * 6.0}
"""Largest magnitude that a format stores with a layer scale of 1."""
PAGE, ROUNDS, CALLS, WRITTEN = 64, 12, 4, 1 << 16
COLD_BYTES, MOST_LAYERS = 400 << 20, 12
BYTES_PER_US = 4.2e6
MLA_DIMS = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)


@dataclass(frozen=True)
class Case:
    """Requests of equal length, over layers of one shape."""

    kind: str
    requests: int
    length: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    mla: MLADims = MLA_DIMS

    def __str__(self) -> str:
        shape = f"{self.heads}/{self.kv_heads} × {self.head_dim}" if self.kind == "mha" else f"{self.heads} heads"
        return f"{self.kind} {shape}, {self.requests} × {self.length}"

    def layer(self, number: int) -> LayerSpec:
        if self.kind == "mha":
            dims = self.heads, self.kv_heads, self.head_dim, self.head_dim
            return LayerSpec(number, AttentionKind.MHA, *dims, self.head_dim**-0.5)
        width = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        dims = self.heads, self.heads, width, self.mla.qk_nope_head_dim
        return LayerSpec(number, AttentionKind.MLA, *dims, width**-0.5, mla=self.mla)

    @property
    def widths(self) -> tuple[int, int, int]:
        """KV heads, columns of a key and of a result."""
        if self.kind == "mha":
            return self.kv_heads, self.head_dim, self.head_dim
        return 1, self.mla.row_dim, self.mla.kv_lora_rank

    def nbytes(self, format: KVFormat) -> int:
        return self.requests * self.length * format.token_nbytes(self.layer(0))


def find_format(name: str) -> KVFormat:
    provided = load_registry().kv_formats.get(name)
    return BUILT_IN[name] if provided is None else provided.value


class Side:
    """A backend over caches in one format, with a captured batch in which every request decodes its last row.

    ``draw(layer)`` returns rows of keys and values ``[tokens, kv_heads, width]``, in the order of requests.
    """

    def __init__(
        self,
        case: Case,
        format: KVFormat,
        device: torch.device,
        layers: int,
        draw: Callable[[int], Iterator[tuple[Tensor, Tensor]]],
        scales: tuple[float, float] = (1.0, 1.0),
        **options: Any,
    ) -> None:
        self.case, self.layers = case, tuple(case.layer(number) for number in range(layers))
        pages = -(-case.length // PAGE)
        table = torch.randperm(case.requests * pages, device=device).view(case.requests, pages).int()
        sizes: dict[str, Any] = {"num_pages": table.numel(), "page_size": PAGE, "dtype": format, "device": device}
        given: dict[int, Any] = {layer: scales if case.kind == "mha" else scales[0] for layer in range(layers)}
        made = (MHAPool if case.kind == "mha" else MLAPool)(
            self.layers, **sizes, scales=given if format.layer_scale else None
        )
        self.pools = KVPools(mha=made) if isinstance(made, MHAPool) else KVPools(mla=made)
        slots = (table.long().unsqueeze(-1) * PAGE + torch.arange(PAGE, device=device)).flatten(1)[:, : case.length]
        self.slots = slots
        for layer in range(layers):
            begin = 0
            for keys, values in draw(layer):
                chosen = slots.flatten()[begin : begin + len(keys)]
                made.write(layer, chosen, *((keys, values) if case.kind == "mha" else (keys,)))
                begin += len(keys)
        name = "torch_native" if device.type == "cpu" else f"triton_{case.kind}"
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        host = HostContext(
            model=ModelSpec("benchmark", "benchmark", self.layers, case.length),
            device=device,
            dtype=dtype,
            kv_dtype=str(format),
            page_size=PAGE,
            limits=Limits(case.requests, case.requests, case.length),
            pools=self.pools,
            workspace=WorkspaceOwner(),
        )
        spec = load_registry().backends[name].spec
        context = host.for_backend(name, spec.capabilities, roles=frozenset({Role.PREFILL, Role.DECODE}))
        self.backend: AttentionBackend = pkgutil.resolve_name(spec.factory)(context)
        if options:
            self.backend = type(self.backend)(context, **options)
        heads, width, _ = case.widths
        shape, random = (case.requests, case.heads, width), partial(torch.randn, dtype=dtype, device=device)
        self.q, self.k, self.v = random(*shape), random(shape[0], heads, width), random(shape[0], heads, width)
        lens = [case.length] * case.requests
        geometry = Geometry.of_lengths(ForwardMode.DECODE, table, [1] * case.requests, lens, PAGE)
        if device.type == "cpu":
            self.batch = ForwardBatch(geometry)
            self.batch.plan = BatchPlan(self.backend.init_forward_metadata(self.batch))
            return
        self.backend.init_cuda_graph_state(case.requests, case.requests)
        self.batch = ForwardBatch(replace(geometry, host=None, captured=True))
        self.batch.plan = BatchPlan(self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True))
        self.backend.init_forward_metadata_in_graph(self.batch)

    def run(self, number: int, *, save: bool) -> Tensor:
        layer = self.layers[number % len(self.layers)]
        k, v = (self.k, self.v if self.case.kind == "mha" else None) if save else (None, None)
        return self.backend.forward_decode(self.q, k, v, layer, self.batch, save_kv_cache=save)

    def stored_error(self) -> float:
        """Return the relative error of the first request's result against float64 over the rows in the cache."""
        (heads, width, out_width), slots = self.case.widths, self.slots[0]
        if self.pools.mha is not None:
            keys, values = self.pools.mha.read(0, slots)
        else:
            assert self.pools.mla is not None
            keys = values = self.pools.mla.read_rows(0, slots)
        keys, values = keys.double().view(-1, heads, width), values.double().view(-1, heads, width)[..., :out_width]
        queries = self.q[0].double().view(heads, -1, width)
        weights = (torch.einsum("hgd,thd->hgt", queries, keys) * self.layers[0].scale).softmax(-1)
        wanted = torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)
        return float((self.run(0, save=False)[0].double() - wanted).norm() / wanted.norm())

    def graph(self, *, save: bool) -> tuple[Callable[[], None], int]:
        """Return the replay of a captured sequence of calls, and their number."""
        count = max(CALLS, len(self.layers))

        def body() -> Tensor:
            for number in range(count):
                out = self.run(number, save=save)
            return out

        return capture(body)[0].replay, count


def drawn(case: Case, device: torch.device, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Normally distributed rows of a layer, in blocks."""
    heads, width, _ = case.widths
    left = case.requests * case.length
    block = torch.randn(min(WRITTEN, left), heads, width, device=device, dtype=torch.bfloat16)
    while left > 0:
        yield block[:left], block[:left].flip(0)
        left -= len(block)


def build(sides: Mapping[str, Callable[[], Side]]) -> dict[str, Any]:
    """Build sides and run each once, in threads, because most of the time is Triton's compiler. Errors are results."""

    def one(make: Callable[[], Side]) -> Side:
        with torch.inference_mode():
            side = make()
            side.run(0, save=True)
        return side

    with ThreadPoolExecutor() as threads:
        made = {name: threads.submit(attempt, partial(one, make)) for name, make in sides.items()}
    return {name: future.result() for name, future in made.items()}


def measure(case: Case, device: torch.device, formats: tuple[str, ...]) -> dict[str, Any]:
    """Times of all formats, which are in memory together and alternate."""
    found: dict[str, Any] = {}
    makers = {}
    for name in formats:
        format = find_format(name)
        layers = min(max(-(-COLD_BYTES // case.nbytes(format)), 1), MOST_LAYERS)
        found[name] = {"bytes_us": case.nbytes(format) / BYTES_PER_US, "layers": layers}
        makers[name] = partial(Side, case, format, device, layers, partial(drawn, case, device))
    sides, graphs = build(makers), {}  # sides own the memory that graphs read
    for name, side in sides.items():
        if not isinstance(side, Side):
            found[name] |= side
            continue
        for part, save in (("layer", True), ("attend", False)):
            graphs[name, part] = side.graph(save=save)
    for (name, part), us in times_of(graphs).items():
        found[name][f"{part}_us"] = us
    base = found.get("bfloat16", {}).get("layer_us")
    for result in found.values():
        if base and "layer_us" in result:
            result["ratio"] = result["layer_us"] / base
    return found


def times_of(graphs: Mapping[Key, tuple[Callable[[], None], int]]) -> dict[Key, float]:
    """Microseconds per call of captured sequences, which alternate."""
    names = {str(key): key for key in graphs}
    replays = {name: graphs[key][0] for name, key in names.items()}
    times = device_us(replays, ROUNDS, lambda: torch.cuda._sleep(100_000))
    return {key: times[name] / graphs[key][1] for name, key in names.items()}


class Accuracy:
    """Attention errors of all formats over the same rows, against float64 over the rows before they are stored."""

    def __init__(self, case: Case, device: torch.device, outliers: bool) -> None:
        self.case, self.device, self.outliers = case, device, outliers

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``[requests * length, kv_heads, width]`` bfloat16."""
        heads, width, _ = self.case.widths
        random = torch.Generator(self.device).manual_seed(5)
        shape = self.case.requests * self.case.length, heads, width
        keys, values = (torch.randn(*shape, generator=random, device=self.device) for _ in range(2))
        if self.outliers:
            keys[..., ::32] *= 30.0
            keys[::64] *= 8.0
        return keys.bfloat16(), values.bfloat16()

    def wanted(self, q: Tensor) -> Tensor:
        case, (heads, width, out_width) = self.case, self.case.widths
        keys, values = (rows.double().view(case.requests, case.length, heads, width) for rows in self.rows)
        values = values if case.kind == "mha" else keys[..., :out_width]
        queries = q.double().view(case.requests, heads, -1, width)
        logits = torch.einsum("rhgd,rthd->rhgt", queries, keys) * case.layer(0).scale
        return torch.einsum("rhgt,rthd->rhgd", logits.softmax(-1), values).flatten(1, 2)

    def error(self, name: str, calibrated: bool) -> dict[str, float]:
        scales = (1.0, 1.0)
        if calibrated and name in LARGEST:
            scales = tuple(float(rows.abs().max()) / LARGEST[name] for rows in self.rows)  # type: ignore[assignment]
        side = Side(self.case, find_format(name), self.device, 1, lambda _: iter([self.rows]), scales)
        torch.manual_seed(6)
        spread = 1.0 if not self.outliers else 30.0  # so that logits have about the same magnitude
        side.q.normal_().div_(spread)
        wanted, found = self.wanted(side.q), side.run(0, save=False).double()
        return {
            "relative": float((found - wanted).norm() / wanted.norm()),
            "largest": float((found - wanted).abs().max()),
        }


def errors(case: Case, device: torch.device, formats: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("random", "outliers"):
        accuracy = Accuracy(case, device, kind == "outliers")
        found[kind] = {name: attempt(partial(accuracy.error, name, True)) for name in formats}
        if "float8_e4m3fn" in formats:
            found[kind]["float8_e4m3fn, scale 1"] = attempt(partial(accuracy.error, "float8_e4m3fn", False))
    return found


def configurations(kind: str) -> Iterator[tuple[str, Any]]:
    """Kernel configurations of triton_mha or triton_mla, by name."""
    from attnplug_triton_mha.configurations import MHAKernelConfig
    from attnplug_triton_mla.configurations import MLAKernelConfig

    mha = ((64, 3, 3, 4, None), (64, 3, 4, 4, 128), (64, 4, 4, 4, 128), (64, 4, 3, 4, 168), (128, 2, 2, 4, None),
           (128, 3, 3, 4, 168), (64, 3, 4, 2, None), (64, 3, 6, 2, 168), (32, 3, 8, 1, None), (32, 4, 8, 1, None),
           (32, 3, 12, 1, 168))  # fmt: skip
    mla = ((16, 64, 4, 1, 4, None), (16, 64, 3, 2, 4, None), (16, 64, 2, 2, 4, None), (16, 32, 4, 2, 4, None),
           (16, 64, 3, 1, 8, None), (16, 64, 3, 2, 8, 128), (16, 64, 2, 3, 4, 168), (16, 32, 4, 3, 4, 168),
           (32, 64, 3, 1, 8, None), (32, 64, 2, 2, 8, 128))  # fmt: skip
    if kind == "mha":
        for step, stages, programs, warps, registers in mha:
            name = f"step {step}, {stages} stages, {programs} programs, {warps} warps, {registers} registers"
            yield name, MHAKernelConfig(16, step, warps, stages, programs=programs, prefetch=1, registers=registers)
        return
    for tile, step, stages, programs, warps, registers in mla:
        name = f"tile {tile}, step {step}, {stages} stages, {programs} programs, {warps} warps, {registers} registers"
        merge = {"merge_parts": 16, "merge_columns": 512, "overlap": True, "registers": registers}
        yield name, MLAKernelConfig(tile, step, warps, stages, programs=programs, **merge)


def sweep(case: Case, device: torch.device, format: str) -> dict[str, Any]:
    """Time and error of attention by kernel configuration."""
    layers = min(max(-(-COLD_BYTES // case.nbytes(find_format(format))), 1), MOST_LAYERS)
    draw, makers = partial(drawn, case, device), {}
    chosen: dict[str, dict[str, Any]] = {"the table's": {}}
    chosen |= {name: {"choose": partial(_given, config)} for name, config in configurations(case.kind)}
    for name, options in chosen.items():
        makers[name] = partial(Side, case, find_format(format), device, layers, draw, **options)
    sides = build(makers)
    failed = {name: side for name, side in sides.items() if not isinstance(side, Side)}
    graphs = {name: side.graph(save=False) for name, side in sides.items() if isinstance(side, Side)}
    times = times_of(graphs)
    return failed | {name: {"attend_us": us, "error": sides[name].stored_error()} for name, us in times.items()}


def _given(config: Any, *_: object, **__: object) -> Any:
    return config


def cases(kind: str, points: str) -> list[Case]:
    shapes = [tuple(map(int, point.split("x"))) for point in points.split(",")]
    if kind == "mha":
        return [Case(kind, *shape, heads=32) for shape in shapes]
    return [Case(kind, *shape, heads=heads) for heads in (16, 128) for shape in shapes]


def smoke(kind: str, formats: tuple[str, ...]) -> dict[str, Any]:
    """Errors of a tiny case on a CPU, by torch_native."""
    dims = MLADims(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16)
    case = Case(kind, 2, 192, heads=4, kv_heads=2, head_dim=32, mla=dims)
    return errors(case, torch.device("cpu"), formats)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("mha", "mla"), default="mha")
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="NAME")
    parser.add_argument("--points", default="16x32768,1x32768,64x4096", help="requests x tokens of each")
    parser.add_argument("--out", metavar="FILE", type=Path)
    parser.add_argument("--commit", metavar="TEXT", help="what was measured")
    parser.add_argument("--limit", type=float, default=50, help="seconds after which no further case begins")
    parser.add_argument("--sweep", action="store_true", help="measure kernel configurations")
    parser.add_argument("--smoke", action="store_true", help="a tiny case on a CPU")
    given = parser.parse_args(arguments)
    formats = tuple(given.formats)
    torch.manual_seed(0)
    with torch.inference_mode():
        if given.smoke:
            Report(given.out, {"what": WHAT}).put("errors", found := smoke(given.kind, formats))
            show_errors(found)
            return
        if not torch.cuda.is_available():
            sys.exit("kv_formats_h200 measures kernels of an NVIDIA GPU, and torch sees none here; --smoke needs none")
        device, report = torch.device("cuda", 0), Report(given.out, describe(WHAT, PACKAGES, given.commit))
        rows = []
        for case in cases(given.kind, given.points):
            if report.seconds > given.limit:
                print(f"{case}: left out, {report.seconds:.0f} s are over", flush=True)
                continue
            if given.sweep:
                found = {format: attempt(partial(sweep, case, device, format)) for format in formats}
            else:
                found = attempt(partial(measure, case, device, formats))
            rows.append({**asdict(case), "formats": found})
            report.put("cases", rows)
            for name, result in found.items():
                if given.sweep and "error" not in result:
                    for configuration, measured in result.items():
                        words = ", ".join(f"{key} {value}" for key, value in rounded(measured).items())
                        print(f"[{report.seconds:4.0f} s] {case}, {name}, {configuration}: {words}", flush=True)
                    continue
                words = ", ".join(f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, float))
                print(f"[{report.seconds:4.0f} s] {case}, {name}: {words or result}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        if not given.sweep:
            case = replace(cases(given.kind, given.points)[0], requests=4, length=2048)
            report.put("errors", found := errors(case, device, formats))
            show_errors(found)


def rounded(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in measured.items()}


def show_errors(found: dict[str, Any]) -> None:
    for kind, by_format in found.items():
        for name, error in by_format.items():
            words = error.get("error") or f"{error['relative']:.4f}, largest {error['largest']:.4f}"
            print(f"{kind:8} {name:24} {words}", flush=True)
            assert "error" in error or math.isfinite(error["relative"]) or name.endswith("scale 1"), name


if __name__ == "__main__":
    main()
