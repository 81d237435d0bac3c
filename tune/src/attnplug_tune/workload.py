"""Workload of ``tune`` and ``bench``: models, points and backends that the options select."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attnplug.auto.ranking import by_preference
from attnplug.cli.text import warn_of_plugins
from attnplug.declare.errors import UsageError
from attnplug.declare.model import ModelSpec
from attnplug.declare.options import parse_options, split_settings
from attnplug.declare.problem import DType, Problem, Role, model_dtype
from attnplug.declare.settings import Render, Setting
from attnplug.machine.device import open_device
from attnplug.machine.hardware import Processor, this_processor
from attnplug.registry.hosts import load_host
from attnplug.registry.models import load_model
from attnplug.registry.registry import Registry, load_registry
from attnplug.registry.selection import AUTO
from attnplug_tune.measure import Job
from attnplug_tune.points import Point, default_points, parse_points
from attnplug_tune.shapes import Task, layers_to_measure, parse_shapes, tasks_of

_BATCH = {"cuda": 256, "cpu": 16}
_CONTEXT = {"cuda": 65536, "cpu": 1024}


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
        """Requested backends, each of which must be usable, or all usable ones if ``names`` is None.

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
    device, sm = open_device(parsed.device)
    settings = split_settings(parsed.backend_option)
    for name, given in settings.items():
        parse_options(name, registry.get(name).spec.options, given)  # report a wrong option before anything runs
    context = parsed.max_context or min(_CONTEXT[device.type], *(model.context_length for model in models))
    batch = parsed.max_batch or _BATCH[device.type]
    if parsed.points is None:
        points = default_points(device.type, batch, context, parsed.speculative_tokens)
    else:
        points = parse_points(parsed.points)
        context = max(context, *(point.lengths[-1] for point in points))
    problems = tuple(_problem(parsed, model, registry, device.type, sm) for model in models)
    if parsed.host is not None:
        problems = tuple(_hosted(parsed.host, problem) for problem in problems)
    notes = [f"{model.name}: {what} are not measured" for model in models for what in layers_to_measure(model)[1]]
    if any(problem.prefilled_by_host for problem in problems) and any(point.role is Role.PREFILL for point in points):
        notes.append(f"prefills are not measured: {parsed.host} has its own kernels for them")
    processor = this_processor(device.type) or Processor(torch.cuda.get_device_name(device), sm or 0)
    return Workload(registry, device, processor, problems, points, context, settings, tuple(notes))


def _problem(parsed: argparse.Namespace, model: ModelSpec, registry: Registry, device: str, sm: int | None) -> Problem:
    default = model_dtype(model) or (DType.BFLOAT16 if device == "cuda" else DType.FLOAT32)
    dtype = default if parsed.dtype is None else DType.parse(parsed.dtype, Setting.DTYPE)
    full = replace(model, layers=model.full_layers)
    if not layers_to_measure(full)[0]:
        raise UsageError(f"{model.name} has no full-attention layer that can be measured; other kinds are not measured")
    kv_format = registry.kv_format(parsed.kv_dtype or dtype)
    kv_format.check(full.layers, parsed.page_size)
    return Problem(
        full,
        device=device,
        sm=sm,
        dtype=dtype,
        kv_dtype=kv_format.name,
        page_size=parsed.page_size,
        wants_graphs=device == "cuda",
        speculative_tokens=parsed.speculative_tokens,
        tensor_parallel=parsed.tensor_parallel,
    )


def _hosted(name: str, problem: Problem) -> Problem:
    """Adapt a problem to a host."""
    host, _ = load_host(name)
    if refusals := host.refusals(problem):
        raise UsageError(f"{host.title} cannot serve this: {'; '.join(each.format(host.render) for each in refusals)}")
    return host.fit(problem)
