"""Subprocess of ``compile_ahead``: start an engine on a fake GPU, and compile the kernels that it launches."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnplug import Geometry, LayerSpec, Problem, Role
from attnplug.contract.backend import AttentionBackend
from attnplug.declare.errors import AttnplugError
from attnplug.declare.spec import Registered
from attnplug.host import HostLengths
from attnplug.registry import assembly
from attnplug.registry.kernel_builds import declared_builds
from attnplug.registry.loading import attributed_to
from attnplug_engine import engine
from attnplug_engine.execution.compile_ahead import AheadReport, AheadRequest
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.graphs import prefill
from attnplug_engine.kernels import invariant
from attnplug_engine.options import EmbedOptions
from attnplug_engine.parallel.collectives import FirstRank
from attnplug_engine.prepare import Prepared, prepare
from attnplug_engine.recording.backends import skip_kernels
from attnplug_engine.recording.fake_gpu import FakeOperations, fake_gpu
from attnplug_engine.recording.triton_kernels import (
    CompilePool,
    Report,
    json_lines,
    record_launches,
    redirect_stdout,
)
from attnplug_engine.serving import start_up
from attnplug_engine.speculation.rounds import RoundRunner


def main() -> None:
    """Read a pickled ``AheadRequest`` from standard input; write events as JSON lines to standard output."""
    request: AheadRequest = pickle.load(sys.stdin.buffer)
    report = json_lines(redirect_stdout())
    pool, names = CompilePool(request.workers, report), []

    def found(name: str, compile_kernel: Any) -> None:
        names.append(name)
        report({"found": len(names)})
        pool.submit(name, compile_kernel)

    torch.set_num_threads(1)
    record_launches(request.gpu.target, found)
    try:
        start(request, report)
    except AttnplugError as error:
        report({"stopped": str(error)[:2000]})
    except Exception as error:
        report({"stopped": f"{type(error).__name__}: {error}".partition("\n")[0][:400]})
    pool.join()
    report({"finished": len(names)})


def start(request: AheadRequest, report: Report) -> None:
    """Start the requested engine or embedder on the fake GPU. Reports its backends, and kernels that are skipped."""

    def skipped(text: str) -> None:
        report({"skipped": text})

    def build_backend(*args: Any) -> AttentionBackend:
        backend = _build_backend(*args)
        skip_kernels(backend, skipped)
        return backend

    with fake_gpu(request.gpu):
        parallel, options = FirstRank(request.ranks), replace(request.options, device="cuda")
        for owner, name, replacement in (
            *_REPLACED,
            (assembly, "build_backend", build_backend),
            (assembly, "build_kernels", partial(_list_kernels, skipped)),
        ):
            setattr(owner, name, replacement)
        if isinstance(options, EmbedOptions):
            selections = [engine.Embedder(request.model, options, parallel=parallel).selection]
        else:
            made = engine.Engine(request.model, options, parallel=parallel, num_pages=request.num_pages)
            selections = [made.selection, *filter(None, [made.draft_selection])]
    for selection in selections:
        for role, choice in selection.choices.items():
            served_by = choice.chosen_name if choice.schedule is None else " and ".join(choice.schedule.candidates)
            report({"role": role, "backend": served_by})
        for left_out, refusal in selection.failed.items():
            report({"left_out": left_out, "why": refusal.message.partition("\n")[0][:300]})


def _list_kernels(
    skipped: Callable[[str], None], backends: Iterable[tuple[Registered, frozenset[Role], Any]], problem: Problem
) -> None:
    """Report kernels that backends compile themselves and no cache has, instead of compiling and loading them."""
    for backend, roles, options in backends:
        for build in declared_builds(backend, problem, roles, options):
            with attributed_to(backend, f"{build.name} failed"):
                cached = build.is_cached()
            if not cached:
                skipped(f"backend {backend.spec.name}: {build.name} is not Triton's, so it is compiled at start-up")


def _capture(run: Callable[[], None]) -> Callable[[], None]:
    """Run a function once instead of capturing it. Its replay launches the same kernels, so it does nothing."""
    run()
    return lambda: None


def _seconds(run: Callable[[], None], _device: object, *, waits: bool) -> float:
    """Run a function once instead of timing it. With equal times no graph is dropped."""
    run()
    return 0.0


def _warm_up_both(runner: ModelRunner, rounds: RoundRunner | None, *args: Any) -> Any:
    """Warm up with captured prefills, and without: a real start-up drops graphs that save no time."""
    owner, name = (runner.graphs, "prefill") if rounds is None else (rounds, "prefill_graphs")
    captured = getattr(owner, name, None)
    if captured is not None:
        setattr(owner, name, None)
        _warm_up(runner, rounds, *args)
        setattr(owner, name, captured)
    return _warm_up(runner, rounds, *args)


def _with_host_lengths(geometry: Geometry) -> Geometry:
    """Give a geometry host lengths within its bounds, as a backend may that reads them from the device."""
    if geometry.host is not None:
        return geometry
    count, longest = geometry.requests, max(geometry.max_seq_len, geometry.max_new)
    query_lens = [geometry.max_new] * count
    if geometry.new_lens is not None:
        query_lens = [(geometry.rows + place) // count for place in range(count)]
    host = HostLengths(query_lens, [longest] * count)
    return replace(geometry, host=host, max_seq_len=longest, calls=geometry.calls)


def _replace_on_fake_gpu(*call: Any) -> Any:
    """Run an operator of batch-invariant arithmetic. Torch turns the fake operations off inside another one."""
    with FakeOperations():
        return _replace(*call)


def _prepare_few_layers(model: str, options: Any, *args: Any, **named: Any) -> Prepared:
    """Prepare a model with random weights, without layers that launch the same kernels as an earlier layer."""
    prepared = prepare(model, replace(options, random_weights=True), *args, **named)
    if options.speculation is None:  # drafts count the target's layers
        module = prepared.loaded.module
        distinct = {_kernel_shape(layer): layer for layer in reversed(module.layers)}
        module.layers = nn.ModuleList(reversed(distinct.values()))
    return prepared


def _kernel_shape(layer: nn.Module) -> tuple[object, ...]:
    """Return a key of the kernels that a layer launches: its modules, weight shapes and attention specs."""
    modules = [(type(part).__name__, *_attention_of(part)) for part in layer.modules()]
    weights = [(name, tuple(value.shape), value.dtype) for name, value in layer.state_dict().items()]
    return (*modules, *weights)


def _attention_of(module: nn.Module) -> list[LayerSpec]:
    return [replace(value, layer_id=0) for value in vars(module).values() if isinstance(value, LayerSpec)]


_warm_up = start_up.warm_up
_build_backend = assembly.build_backend
_replace: Callable[..., Any] = invariant.Replacing.__torch_dispatch__
_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (engine, "prepare", _prepare_few_layers),
    (engine, "compile_ahead", lambda *_: AheadReport()),  # this process does it
    (start_up, "GraphCapture", lambda _device: _capture),
    (start_up, "warm_up", _warm_up_both),
    (prefill, "_seconds", _seconds),
    (Geometry, "with_host_lengths", _with_host_lengths),
    (invariant.Replacing, "__torch_dispatch__", _replace_on_fake_gpu),
)
"""Functions to replace in a recorded start-up: owner, name, replacement."""


if __name__ == "__main__":
    main()
