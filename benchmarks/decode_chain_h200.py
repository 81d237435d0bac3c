"""Time of attention, output projection, norm and gate-up projection of decode layers on an H200, in about two minutes.

python benchmarks/decode_chain_h200.py --out benchmarks/results/decode_chain_h200.json
python benchmarks/decode_chain_h200.py --smoke                           tiny layers on a CPU, kernels interpreted

Graphs have 16 layers of ``decode_models``' Llama-1B or MLA model, each with its own weights and cache. Layers call the
engine's modules and backends as a captured step does; queries, keys and values of a layer are columns of the previous
layer's result, so that every layer waits for the one before. All times are microseconds per layer, medians of replays
that alternate between graphs. For each of the four shapes:

- ``base``: the chain as it is, and ``base again`` for the spread;
- ``alone``: the same calls with one kind of kernel only; ``floor``: bytes of each part at 4.2 TB/s; ``without``: the
  chain with one part left out;
- ``a``: products that load or prefetch weights before they wait for attention (programmatic dependent launch; the base
  already does for one row), and other tile configurations, which change what fits beside attention;
- ``b``: a side stream that prefetches the next weights into L2 during attention, by bytes and programs;
- ``c``: other splits and merges of attention.

A variant is timed if a layer of it agrees with float64, its results with the base's, and its replays with each other.
Errors are recorded in its place. ``timelines`` are the kernels of two layers of the base and of the best variants, as
the profiler sees them.
Kernels are compiled first, by processes that share Triton's cache. No variant begins after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_models import MODELS, smaller
from decode_trace import recorded
from gpu_clock import capture, device_us
from gpu_report import Report, attempt, describe
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

from decode_chain import PROGRAMS, Chain, Layer, Shape, exact_layer
from decode_chain_kernels import HELD, OWN, Fetched, early_skinny_gemm, early_streamed_gemm, fetch

from attnplug_engine.kernels.gemm_tiles import STREAMED, GemmConfig, choose_few
from attnplug_engine.kernels.skinny_gemm import skinny_gemm
from attnplug_engine.models.layers import Linear

WHAT = "decode layers: attention, output projection, norm and gate-up in CUDA graphs, µs of a layer"
PACKAGES = ("torch", "triton", "attnplug", "attnplug-engine", "attnplug-triton-mha", "attnplug-triton-mla")
LAYERS = 16
ROUNDS, REPEATS = 21, 3
MB = 1 << 20
BYTES = (4 * MB, 16 * MB, 32 * MB)
_COMPILE_SECONDS = 100
_SLEEP = 400_000
"""Clock cycles before each replay, in which the host launches it."""
_LARGEST_ERROR = 0.02
"""Largest relative distance of a layer's results from float64, by norms. bfloat16 rounds to 0.002."""
_LARGEST_DRIFT = 0.1
"""Largest distance from the base's results after all layers, each of which rounds once more."""

OUT_CONFIGS = {
    1: [GemmConfig(*each) for each in ((8, 2048, 4), (4, 2048, 8), (4, 2048, 4), (2, 2048, 2), (1, 2048, 2))],
    16: [
        *(GemmConfig(16, columns, warps, tiles=True) for columns, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8))),
        *(GemmConfig(lines, 128, 4, tiles=True, stages=stages) for lines, stages in ((16, 12), (32, 10), (64, 8))),
        GemmConfig(32, 256, 4, tiles=True, stages=6),
    ],
}
GATE_UP_CONFIGS = {
    1: [
        *(GemmConfig(*each) for each in ((8, 2048, 8), (4, 2048, 8), (2, 2048, 4), (2, 2048, 2), (1, 2048, 2))),
        *(GemmConfig(4, 2048, 4, stages=1, along=along) for along in (1, 2, 4)),
        *(GemmConfig(2, 2048, warps, stages=1, along=2) for warps in (2, 4)),
        *(GemmConfig(2, 2048, 4, stages=stages, along=2, programs=most) for stages, most in ((3, 4), (2, 6), (4, 3))),
        GemmConfig(4, 2048, 4, stages=4, programs=1),
    ],
    16: [
        *(GemmConfig(16, columns, warps, tiles=True) for columns, warps in ((512, 4), (512, 8))),
        *(GemmConfig(32, 128, 4, tiles=True, stages=stages) for stages in (4, 8)),
        GemmConfig(32, 256, 4, tiles=True, stages=4),
        GemmConfig(64, 64, 8, tiles=True, stages=8),
        GemmConfig(64, 128, 4, tiles=True, stages=4),
    ],
}
"""Other configurations of the products, by rows."""


@dataclass(frozen=True)
class Variant:
    """Functions of the layer's number, called one after the other; ``None`` leaves a part out."""

    attend: Callable[[int, Tensor], Tensor] | None
    project: Callable[[int, Tensor, Tensor], Tensor] | None
    gate_up: Callable[[int, Tensor], Tensor] | None
    before: Callable[[int], None] = lambda number: None
    after: Callable[[], None] = lambda: None
    keep: Any = field(default=None, compare=False)
    """Memory that a graph needs."""

    def run(self, chain: Chain, layers: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Run layers; return the last one's attention, hidden states and result."""
        attended, hidden, act = chain.first[:, : chain.layers[0].out.weight.shape[1]], chain.hidden, chain.first
        for number in range(layers or len(chain.layers)):
            self.before(number)
            if self.attend is not None:
                attended = self.attend(number, act)
            hidden = self.project(number, attended, hidden) if self.project is not None else attended
            if self.gate_up is not None:
                act = self.gate_up(number, hidden)
        self.after()
        return attended, hidden, act


def base_of(chain: Chain) -> Variant:
    return Variant(chain.attend, chain.project, chain.gate_up)


def variants(chain: Chain, kinds: str = "abc") -> Iterator[tuple[str, Callable[[], Variant]]]:
    """Names and builders of the variants of some kinds, without the base. A builder may raise."""
    base, seen = base_of(chain), set()
    for name, build in (*_early(chain, base), *_side(chain, base), *_splits(chain, base)):
        # A CPU runs one of the variants that differ by numbers only.
        kind = name if chain.is_cuda else re.sub(r" [^a-z]+( |$)", " ", name)
        if name[0] in kinds and kind not in seen:
            seen.add(kind)
            yield name, build


def _early(chain: Chain, base: Variant) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """(a) Products that load or prefetch weights before they wait, and other tile configurations."""
    rows, layers = chain.shape.requests, chain.layers
    few = rows == 1

    def plain(weight: Callable[[Layer], Linear], config: GemmConfig, number: int, x: Tensor, **how: Any) -> Tensor:
        layer = layers[number]
        gated = weight(layer) is layer.gate_up
        norm = (layer.norm.weight, layer.norm.eps) if gated else None
        return skinny_gemm(x, weight(layer).weight, config, norm=norm, gated=gated, **how)

    def fetching(nbytes: int) -> Variant:
        """The output projection asks for the first weights of gate-up while it waits for attention."""

        def project(number: int, attended: Tensor, hidden: Tensor) -> Tensor:
            layer = layers[number]
            fetched, weight = Fetched(layer.gate_up.weight, nbytes), layer.out.weight
            if few:
                config = choose_few(*weight.shape)
                return early_skinny_gemm(attended, weight, config, hidden, fetched)
            return early(attended, weight, STREAMED, onto=hidden, fetched=fetched)

        return replace(base, project=project)

    def early(x: Tensor, weight: Tensor, config: GemmConfig, *, held: int = 0, **how: Any) -> Tensor:
        half = x.shape[1] // 2  # a limit for the tiny layers of a CPU only
        config = replace(config, block_k=min(config.block_k, half))
        return early_streamed_gemm(x, weight, config, held=min(held, half), **how)

    def early_out(number: int, attended: Tensor, hidden: Tensor, *, config: GemmConfig, **how: int) -> Tensor:
        return early(attended, layers[number].out.weight, config, onto=hidden, **how)

    def early_gate_up(number: int, hidden: Tensor, *, config: GemmConfig, **how: int) -> Tensor:
        layer = layers[number]
        return early(layer.norm(hidden), layer.gate_up.weight, config, gated=True, **how)

    for nbytes in BYTES:
        yield f"a: output fetches {nbytes // MB} MB of gate-up", partial(fetching, nbytes)
    if not few:
        for own in OWN[False][0]:
            project = partial(early_out, config=OWN[False][1], own=own)
            yield f"a: output prefetches {own} own columns", partial(replace, base, project=project)
        for own in OWN[True][0]:
            gate_up = partial(early_gate_up, config=OWN[True][1], own=own)
            yield f"a: gate-up prefetches {own} own columns", partial(replace, base, gate_up=gate_up)
        project = partial(early_out, config=OWN[False][1], own=2048)
        gate_up = partial(early_gate_up, config=OWN[True][1], own=512)
        yield "a: output prefetches 2048, gate-up 512", partial(replace, base, project=project, gate_up=gate_up)
        for held, config in HELD[False]:
            project = partial(early_out, config=config, held=held)
            yield f"a: output loads {held} columns early", partial(replace, base, project=project)
        for held, config in HELD[True]:
            gate_up = partial(early_gate_up, config=config, held=held)
            yield f"a: gate-up loads {held} columns early", partial(replace, base, gate_up=gate_up)
        (_, (held, config)), (gate_held, gate_config) = HELD[False], HELD[True][0]
        project = partial(early_out, config=config, held=held)
        gate_up = partial(early_gate_up, config=gate_config, held=gate_held)
        yield f"a: output loads {held}, gate-up {gate_held}", partial(replace, base, project=project, gate_up=gate_up)
    for config in OUT_CONFIGS[1 if few else 16]:

        def out_by(number: int, attended: Tensor, hidden: Tensor, *, config: GemmConfig = config) -> Tensor:
            return plain(lambda layer: layer.out, config, number, attended, onto=hidden)

        yield f"a: output by {_brief(config)}", partial(replace, base, project=out_by)
    for config in GATE_UP_CONFIGS[1 if few else 16]:
        if config.preloads and not chain.is_cuda:
            continue  # Triton's interpreter does not run Gluon

        def gate_up_by(number: int, hidden: Tensor, *, config: GemmConfig = config) -> Tensor:
            return plain(lambda layer: layer.gate_up, config, number, hidden)

        yield f"a: gate-up by {_brief(config)}", partial(replace, base, gate_up=gate_up_by)


def _brief(config: GemmConfig) -> str:
    kind = "preloaded" if config.preloads else "streamed" if config.stages else "tiles" if config.tiles else "rows"
    numbers = [config.block_n, config.block_k, config.warps, *([config.stages] if config.stages else [])]
    numbers += [config.along, config.programs] if config.preloads else []
    return f"{kind} {' '.join(map(str, numbers))}"


def _side(chain: Chain, base: Variant) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """(b) Prefetches of the next weights into L2 on a side stream, during attention."""
    modes = ("bulk", "lines", "load") if chain.is_cuda else ("load",)

    def fetching(nbytes: int, programs: int, mode: str, output: bool) -> Variant:
        def before(number: int) -> None:
            layer = chain.layers[number]
            fetched = Fetched(layer.gate_up.weight, nbytes, layer.out.weight if output else None)
            if chain.side is None:
                fetch(fetched, chain.sums, programs, mode)
                return
            chain.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(chain.side):
                fetch(fetched, chain.sums, programs, mode)

        def after() -> None:
            if chain.side is not None:
                torch.cuda.current_stream().wait_stream(chain.side)

        return replace(base, before=before, after=after)

    for mode in modes:
        for output in (True, False):
            for nbytes in BYTES:
                for programs in PROGRAMS:
                    if mode == modes[0] or (programs == PROGRAMS[1] and nbytes == BYTES[1]):
                        name = f"b: {mode} {nbytes // MB} MB by {programs}, from {'output' if output else 'gate-up'}"
                        yield name, partial(fetching, nbytes, programs, mode, output)


def _splits(chain: Chain, base: Variant) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """(c) Other splits and merges of attention."""
    now = chain.config_now

    def with_config(config: Any) -> Variant:
        using = chain.attention_of(config)
        return replace(base, attend=lambda number, act: chain.attend(number, act, using), keep=using)

    changes: list[dict[str, Any]]
    if chain.dims is None:
        changes = [{"programs": programs} for programs in (1, 2, 3, 4)]
        changes += [{"step": 16}, {"step": 32}, {"step": 64}, {"step": 128}]
        changes += [{"step": 16, "programs": 3}, {"step": 16, "programs": 4}, {"step": 32, "programs": 1}]
        changes += [{"separate_merge": False}, {"separate_merge": True}, {"separate_merge": False, "programs": 1}]
        changes += [{"prefetch": 0}, {"prefetch": 1}, {"single": not now.single}, {"warps": 2}, {"warps": 8}]
        changes += [{"step": 16, "separate_merge": False}, {"registers": 128}]
    else:
        changes = [{"programs": 2}, {"kernel": "triton"}, {"kernel": "triton", "step": 16}]
        changes += [{"kernel": "triton", "step": 64}, {"kernel": "triton", "step": 32, "programs": 2}]
        changes += [
            {"kernel": "triton", "merge": "last"},
            {"least_steps": 2},
            {"least_steps": 4},
            {"stages": 2},
            {"stages": 4},
        ]
        changes += [{"part_cost": 1 / 16}, {"part_cost": 1 / 4}]
        for parts, columns, warps in ((128, 32, 1), (64, 64, 2), (32, 64, 1), (16, 128, 1), (16, 512, 4), (16, 256, 2)):
            changes.append({"merge_parts": parts, "merge_columns": columns, "merge_warps": warps})
        changes.append({"programs": 2, "merge_parts": 16, "merge_columns": 128, "merge_warps": 1})
    for change in changes if chain.is_cuda else changes[:2]:
        config = replace(now, **change)
        if config != now:
            yield f"c: {', '.join(f'{name} {value}' for name, value in change.items())}", partial(with_config, config)


def parts_of(chain: Chain) -> Mapping[str, Variant]:
    """Chains of one part only, and chains without one."""
    base = base_of(chain)
    return {
        "alone: attention": Variant(lambda number, act: chain.attend(number, chain.first), None, None),
        "alone: output": Variant(None, lambda number, attended, _: chain.project(number, attended, chain.hidden), None),
        "alone: norm": Variant(None, lambda number, *_: chain.layers[number].norm(chain.hidden), None),
        "alone: gate_up": Variant(None, lambda *_: chain.hidden, chain.gate_up),
        "without: attention": replace(base, attend=None),
        "without: output": replace(base, project=None),
        "without: gate_up": replace(base, gate_up=None),
    }


# Checks


def difference(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest relative distance of results, by norms; NaN counts as infinite."""
    pairs = zip(found, wanted, strict=True)
    each = [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]
    return max(math.inf if math.isnan(value) else value for value in each)


class Runs:
    """Runs of a variant: replays of its graph, or calls where there are no graphs."""

    def __init__(self, variant: Variant, chain: Chain) -> None:
        self._variant, self._chain, self._replay = variant, chain, None
        if chain.is_cuda:
            graph, self._out = capture(lambda: variant.run(chain))  # type: ignore[arg-type,return-value] # of tensors
            self._replay = graph.replay

    def replay(self) -> None:
        if self._replay is None:
            self._variant.run(self._chain)
        else:
            self._replay()

    def results(self) -> tuple[Tensor, ...]:
        """Results of one run, in memory that had none before."""
        if self._replay is None:
            return self._variant.run(self._chain)
        for out in self._out:
            out.fill_(math.nan)
        self._replay()
        torch.cuda.synchronize()
        return tuple(out.clone() for out in self._out)

    def stable_results(self) -> tuple[Tensor, ...]:
        """Results that further runs repeat; raises if they differ by more than the order of their sums explains."""
        first = self.results()
        for _ in range(REPEATS if self._chain.is_cuda else 0):
            if (distance := difference(self.results(), first)) > _LARGEST_ERROR / 4:
                raise RuntimeError(f"runs differ from each other by {distance:.4f}")
        return first


# Measurement


def measure(shape: Shape, chain: Chain, over: Callable[[], bool], *, layers: int, kinds: str = "abc") -> dict[str, Any]:
    """Everything of one shape. ``over`` returns True if no further variant may begin."""
    exact = exact_layer(chain, chain.first, chain.hidden)
    base = base_of(chain)
    error = difference(base.run(chain, 1), exact)
    found: dict[str, Any] = {"floor_us": chain.floors(), "base_error": error, "errors": {}, "left_out": []}
    if error > _LARGEST_ERROR:
        found["errors"]["base"] = f"the base differs from float64 by {error:.4f}"
        return found
    graphs: dict[str, Runs] = {"base": Runs(base, chain), "base again": Runs(base, chain)}
    wanted = graphs["base"].stable_results()
    differences: dict[str, float] = {}
    for name, part in parts_of(chain).items():
        made = attempt(partial(Runs, part, chain))
        (graphs if isinstance(made, Runs) else found["errors"])[name] = made
    for name, build in variants(chain, kinds):
        if over():
            found["left_out"].append(name)
            continue
        made = attempt(partial(_checked, build, chain, exact, wanted))
        if isinstance(made, dict):
            found["errors"][name] = made["error"]
        else:
            graphs[name], differences[name] = made
    found["difference"] = differences
    if not chain.is_cuda:
        return found
    times = device_us({name: runs.replay for name, runs in graphs.items()}, ROUNDS, lambda: torch.cuda._sleep(_SLEEP))
    us = {name: time / layers for name, time in times.items()}
    found["us"] = {name: round(time, 3) for name, time in us.items()}
    found["share_of_floor"] = sum(found["floor_us"].values()) / us["base"]
    found["best"] = {}
    for kind in "abc":
        own = {name: time for name, time in us.items() if name.startswith(f"{kind}:")}
        if own:
            name = min(own, key=lambda each: own[each])
            found["best"][kind] = {"name": name, "us": round(own[name], 3), "of_base": round(own[name] / us["base"], 4)}
    traced = {"base", *(best["name"] for best in found["best"].values())}
    found["timelines"] = {
        name: attempt(partial(timeline, graphs[name], layers)) for name in sorted(traced) if not over()
    }
    return found


def _checked(
    build: Callable[[], Variant], chain: Chain, exact: tuple[Tensor, ...], wanted: tuple[Tensor, ...]
) -> tuple[Runs, float]:
    variant = build()
    if (error := difference(variant.run(chain, 1), exact)) > _LARGEST_ERROR:
        raise RuntimeError(f"a layer differs from float64 by {error:.4f}")
    runs = Runs(variant, chain)
    distance = difference(runs.stable_results(), wanted)
    if distance > _LARGEST_DRIFT:
        raise RuntimeError(f"results differ from the base's by {distance:.4f}")
    return runs, distance


def timeline(runs: Runs, layers: int) -> list[list[Any]]:
    """Kernels of two layers in the middle of a replay: name, start and end in microseconds."""

    def replays(count: int) -> float:
        for _ in range(count):
            runs.replay()
        torch.cuda.synchronize()
        return 0.0

    events, _ = recorded(replays, 2, is_cuda=True)
    kernels = sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") == "kernel")
    kernels = kernels[len(kernels) // 2 :]  # the second replay
    begin, end = kernels[0][0], max(start + took for start, took, _ in kernels)
    first, last = (begin + (end - begin) * part / layers for part in (layers // 2, layers // 2 + 2))
    inside = [each for each in kernels if first <= each[0] < last]
    return [[name[:60], round(start - first, 2), round(start + took - first, 2)] for start, took, name in inside]


def warm(chain: Chain, variant: Variant) -> None:
    """Compile what a variant does not share with the base."""
    base = base_of(chain)
    variant.before(0)
    if variant.attend is not None and variant.attend != base.attend:
        variant.attend(0, chain.first)
    if variant.project is not None and variant.project != base.project:
        variant.project(0, chain.first[:, : chain.layers[0].out.weight.shape[1]], chain.hidden)
    if variant.gate_up is not None and variant.gate_up != base.gate_up:
        variant.gate_up(0, chain.hidden)
    variant.after()


def _compile(shapes: list[Shape], part: int, parts: int, kinds: str) -> None:
    """Call every kernel of a part once."""
    for index, shape in enumerate(shapes):
        chain = Chain(shape, MODELS[shape.model], 1, torch.device("cuda"))
        todo: list[Callable[[], None]] = [lambda chain=chain: base_of(chain).run(chain)]
        todo += [lambda chain=chain: chain.layers[0].norm(chain.hidden)]
        todo += [lambda chain=chain, build=build: warm(chain, build()) for _, build in variants(chain, kinds)]
        for each in todo[(part + index) % parts :: parts]:
            attempt(each)
    torch.cuda.synchronize()


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,mla")
    parser.add_argument("--requests", default="1,16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--kinds", default="abc", help="kinds of variants to time, e.g. ac")
    parser.add_argument("--seconds", type=float, default=210.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--compile", metavar="PART/PARTS", help="only fill Triton's cache with a part of the kernels")
    arguments = parser.parse_args(given)
    models, requests = arguments.models.split(","), [int(each) for each in arguments.requests.split(",")]
    with torch.inference_mode():
        if arguments.smoke:
            _smoke(models, requests, Report(arguments.out, {"what": WHAT}))
            return
        if not torch.cuda.is_available():
            sys.exit(
                "decode_chain_h200 measures kernels of an NVIDIA GPU, and torch sees none here; --smoke needs none"
            )
        shapes = [Shape(model, count, arguments.context) for model in models for count in requests]
        if arguments.compile:
            part, parts = map(int, arguments.compile.split("/"))
            _compile(shapes, part, parts, arguments.kinds)
            return
        report = Report(arguments.out, describe(WHAT, PACKAGES, arguments.commit))
        parts = max((os.cpu_count() or 2) - 2, 1)
        same = ["--models", arguments.models, "--requests", arguments.requests, "--context", str(arguments.context)]
        same += ["--kinds", arguments.kinds]
        workers = [
            subprocess.Popen([sys.executable, __file__, *same, "--compile", f"{part}/{parts}"]) for part in range(parts)
        ]
        for worker in workers:
            try:
                worker.wait(timeout=max(_COMPILE_SECONDS - report.seconds, 0.1))
            except subprocess.TimeoutExpired:  # the rest is compiled when it is first called
                worker.kill()
        report.put("compiled after", report.seconds)
        for shape in shapes:
            found = attempt(partial(_measured, shape, lambda: report.seconds > arguments.seconds, arguments.kinds))
            report.put(str(shape), found)
            print(f"[{report.seconds:4.0f} s] {shape}: base {found.get('us', {}).get('base')},", end=" ")
            print(found.get("best") or found.get("error") or found.get("errors"), flush=True)
            torch.cuda.empty_cache()


def _measured(shape: Shape, over: Callable[[], bool], kinds: str) -> dict[str, Any]:
    chain = Chain(shape, MODELS[shape.model], LAYERS, torch.device("cuda"))
    return measure(shape, chain, over, layers=LAYERS, kinds=kinds)


def _smoke(models: list[str], requests: list[int], report: Report) -> None:
    for model in models:
        for count in requests:
            shape = Shape(model, min(count, 2), 20)
            chain = Chain(shape, {**smaller(MODELS[model]), "intermediate_size": 192}, 1, torch.device("cpu"))
            report.put(str(shape), measure(shape, chain, lambda: False, layers=1))
    print(json.dumps(report.found))


if __name__ == "__main__":
    main()
