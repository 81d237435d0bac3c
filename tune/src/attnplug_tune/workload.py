"""Workload of ``tune`` and ``bench``: models, points and backends that the options select."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attnplug.auto.ranking import by_preference
from attnplug.cli.output import warn_of_plugins
from attnplug.declare.device import Processor
from attnplug.declare.errors import Render, Setting, UsageError
from attnplug.declare.model import ModelSpec
from attnplug.declare.options import parse_options, split_settings
from attnplug.declare.problem import DType, ExtendPath, Problem, Role, model_dtype
from attnplug.machine.runtime import open_device, runtime_of
from attnplug.registry.hosts import load_host
from attnplug.registry.registry import Registry, load_model, load_registry
from attnplug.registry.selection import AUTO
from attnplug_tune.measure import Job
from attnplug_tune.points import Point, default_points, parse_points
from attnplug_tune.shapes import Task, layers_to_measure, parse_shapes, tasks_of

_BATCH, _GPU_BATCH = 16, 256
_CONTEXT, _GPU_CONTEXT = 1024, 65536


@dataclass(frozen=True, slots=True)
class Workload:
    """Models and points to measure, and the device to measure on."""

    registry: Registry
    device: torch.device
    processor: Processor
    problems: tuple[Problem, ...]
    points: tuple[Point, ...]
    max_context: int
    settings: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]
    """Parts of the models that cannot be measured, one line each."""

    def job(self, backend: str, *, raw: bool = False) -> Job:
        settings = self.settings.get(backend, {})
        return Job(backend, self._tasks(backend), str(self.device), self.max_context, settings=settings, raw=raw)

    def _tasks(self, backend: str) -> tuple[Task, ...]:
        if backend != AUTO:
            return tasks_of(self.registry.get(backend), self.problems, self.points)
        found: dict[Task, None] = {}  # auto: the tasks of all usable backends
        for name in self.usable():
            found |= dict.fromkeys(tasks_of(self.registry.get(name), self.problems, self.points))
        return tuple(found)

    def usable(self) -> tuple[str, ...]:
        """Names of the backends that serve some role of some model, in order of preference."""
        ordered = sorted(self.registry.backends.values(), key=by_preference)
        return tuple(each.spec.name for each in ordered if tasks_of(each, self.problems, self.points))

    def chosen(self, names: str | None, render: Render, *, auto: bool = True) -> tuple[str, ...]:
        """Return the requested backends, which must all be usable, or all usable ones if ``names`` is None.

        ``auto``: whether ``auto`` itself may be requested.
        """
        if names is None:
            if not (found := self.usable()):
                why = "'attnplug explain' says why for a model"
                raise UsageError("; ".join(["no installed backend can serve the workload", *self.notes, why]))
            return found
        requested = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
        if AUTO in requested and not auto:
            raise UsageError(f"--backends {names} names auto, which has no times of its own; name backends")
        for name in requested:
            if name != AUTO and not tasks_of(self.registry.get(name), self.problems, self.points):
                raise UsageError(f"backend {name} cannot be measured here: {self._reasons(name, render)}")
        return requested

    def _reasons(self, name: str, render: Render) -> str:
        spec = self.registry.get(name).spec
        found: dict[str, None] = {}
        for problem in self.problems:
            for role in sorted({point.role for point in self.points}):
                found |= dict.fromkeys(refusal.format(render) for refusal in spec.refusals(problem, role))
        return "; ".join(found) or "it serves none of the points"


def read_workload(parsed: argparse.Namespace) -> Workload:
    """Read the workload from checked options of a command. Raises UsageError for what cannot be measured."""
    registry = load_registry()
    models = parse_shapes(parsed.shapes) if parsed.model is None else (load_model(parsed.model, registry),)
    warn_of_plugins(registry)
    device, processor = open_device(parsed.device, registry.device)
    settings = split_settings(parsed.backend_option)
    for name, given in settings.items():
        parse_options(name, registry.get(name).spec.options, given)  # report a wrong option before anything runs
    on_gpu = runtime_of(device).module is not None
    context = parsed.max_context or min(
        _GPU_CONTEXT if on_gpu else _CONTEXT, *(model.context_length for model in models)
    )
    batch = parsed.max_batch or (_GPU_BATCH if on_gpu else _BATCH)
    if parsed.points is None:
        points = default_points(on_gpu, batch, context, parsed.speculative_tokens)
    else:
        points = parse_points(parsed.points)
        context = max(context, *(max(point.lengths) for point in points))
    problems = tuple(_problem(parsed, model, registry, device, processor) for model in models)
    if parsed.host is not None:
        problems = tuple(_hosted(parsed.host, problem) for problem in problems)
    notes = [f"{model.name}: {what} are not measured" for model in models for what in layers_to_measure(model)[1]]
    if any(problem.prefilled_by_host for problem in problems) and any(point.role is Role.PREFILL for point in points):
        notes.append(f"prefills are not measured: {parsed.host} has its own kernels for them")
    return Workload(registry, device, processor, problems, points, context, settings, tuple(notes))


def _problem(
    parsed: argparse.Namespace, model: ModelSpec, registry: Registry, device: torch.device, processor: Processor
) -> Problem:
    runtime = runtime_of(device)
    default = model_dtype(model) or (DType.FLOAT32 if runtime.module is None else DType.BFLOAT16)
    dtype = default if parsed.dtype is None else DType.parse(parsed.dtype, Setting.DTYPE)
    full = replace(model, layers=model.full_layers)
    if not layers_to_measure(full)[0]:
        raise UsageError(f"{model.name} has no full-attention layer that can be measured; other kinds are not measured")
    kv_format = registry.kv_format(parsed.kv_dtype or dtype)
    kv_format.check(full, parsed.page_size)
    return Problem(
        full,
        device=device.type,
        sm=processor.sm or None,
        architecture=processor.architecture,
        dtype=dtype,
        kv_dtype=kv_format.name,
        page_size=parsed.page_size,
        wants_graphs=runtime.graph is not None,
        speculative_tokens=parsed.speculative_tokens,
        tensor_parallel=parsed.tensor_parallel,
        mla_extend=None if parsed.mla_extend is None else ExtendPath.parse(parsed.mla_extend),
    )


def _hosted(name: str, problem: Problem) -> Problem:
    """Adapt a problem to a host."""
    host, _ = load_host(name)
    if refusals := host.refusals(problem):
        raise UsageError(f"{host.title} cannot serve this: {'; '.join(each.format(host.render) for each in refusals)}")
    return host.fit(problem)
