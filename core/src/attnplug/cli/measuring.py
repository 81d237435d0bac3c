"""What ``tune`` and ``bench`` share: their options, what they lead to, and how far a run has come."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from attnplug.choose.hosts import load_host
from attnplug.choose.models import load_model
from attnplug.choose.ranking import by_preference
from attnplug.choose.registry import Registry, load_registry
from attnplug.choose.selection import AUTO
from attnplug.cli.text import table
from attnplug.cli.warn import warn_of_plugins
from attnplug.declare.errors import UsageError
from attnplug.declare.model import ModelSpec
from attnplug.declare.options import parse_options, split_settings
from attnplug.declare.problem import DType, Problem, Role, model_dtype
from attnplug.declare.settings import Render, Setting
from attnplug.machine.device import open_device
from attnplug.machine.hardware import Processor, this_processor
from attnplug.tune.measure import Failed, Job, Outcome, Skipped, Timed
from attnplug.tune.page import fastest
from attnplug.tune.points import Point, default_points, parse_points
from attnplug.tune.results import Row
from attnplug.tune.shapes import Task, layers_to_measure, parse_shapes, tasks_of

_BATCH = {"cuda": 256, "cpu": 16}
_CONTEXT = {"cuda": 65536, "cpu": 1024}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and where."""

    registry: Registry
    device: torch.device
    processor: Processor
    problems: tuple[Problem, ...]
    points: tuple[Point, ...]
    max_context: int
    settings: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]
    """What cannot be measured of the models."""

    def job(self, backend: str, *, raw: bool = False) -> Job:
        settings = self.settings.get(backend, {})
        return Job(backend, self._tasks(backend), str(self.device), self.max_context, settings=settings, raw=raw)

    def _tasks(self, backend: str) -> tuple[Task, ...]:
        if backend != AUTO:
            return tasks_of(self.registry.get(backend), self.problems, self.points)
        found: dict[Task, None] = {}  # what any of the others can be measured at
        for name in self.usable():
            found |= dict.fromkeys(tasks_of(self.registry.get(name), self.problems, self.points))
        return tuple(found)

    def usable(self) -> tuple[str, ...]:
        """The names of the backends that serve some role of some model, in the order in which they are likely to."""
        ordered = sorted(self.registry.backends.values(), key=by_preference)
        return tuple(each.spec.name for each in ordered if tasks_of(each, self.problems, self.points))

    def chosen(self, names: str | None, render: Render, *, auto: bool = True) -> tuple[str, ...]:
        """The backends asked for, each of which must be usable, or all that are. ``auto`` may be one where it can be
        measured."""
        if names is None:
            if not (found := self.usable()):
                why = "'attnplug explain' says why for a model"
                raise UsageError("; ".join(["no installed backend can serve what is to be measured", *self.notes, why]))
            return found
        asked = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
        if AUTO in asked and not auto:
            raise UsageError(f"--backends {names} names auto, which is a choice and has no times of its own")
        for name in asked:
            if name != AUTO and not tasks_of(self.registry.get(name), self.problems, self.points):
                raise UsageError(f"backend {name} cannot be measured here: {self._reasons(name, render)}")
        return asked

    def _reasons(self, name: str, render: Render) -> str:
        spec = self.registry.get(name).spec
        found: dict[str, None] = {}
        for problem in self.problems:
            for role in sorted({point.role for point in self.points}):
                found |= dict.fromkeys(refusal.format(render) for refusal in spec.refusals(problem, role))
        return "; ".join(found) or "it serves none of the points"


def read_plan(parsed: argparse.Namespace) -> Plan:
    """What the options ask for. Raises UsageError for what cannot be measured."""
    if (parsed.model is None) == (parsed.shapes is None):
        raise UsageError("give one of --model and --shapes: what is to be measured")
    registry = load_registry()
    models = parse_shapes(parsed.shapes) if parsed.model is None else (load_model(parsed.model, registry),)
    warn_of_plugins(registry)
    device, sm = open_device(parsed.device)
    settings = split_settings(parsed.backend_option)
    for name, given in settings.items():
        parse_options(name, registry.get(name).spec.options, given)  # a wrong one is told before anything runs
    context = parsed.max_context or min(_CONTEXT[device.type], *(model.context_length for model in models))
    batch = parsed.max_batch or _BATCH[device.type]
    if parsed.points is None:
        points = default_points(device.type, batch, context, parsed.speculative_tokens)
    else:
        points = parse_points(parsed.points)
        context = max(context, *(point.lengths[-1] for point in points))
    problems = tuple(_problem(parsed, model, device.type, sm) for model in models)
    if parsed.host is not None:
        problems = tuple(_hosted(parsed.host, problem) for problem in problems)
    notes = [f"{model.name}: {what} are not measured" for model in models for what in layers_to_measure(model)[1]]
    if any(problem.prefilled_by_host for problem in problems) and any(point.role is Role.PREFILL for point in points):
        notes.append(f"prefills are not measured: {parsed.host} has kernels of its own for them")
    processor = this_processor(device.type) or Processor(torch.cuda.get_device_name(device), sm or 0)
    return Plan(registry, device, processor, problems, points, context, settings, tuple(notes))


def _problem(parsed: argparse.Namespace, model: ModelSpec, device: str, sm: int | None) -> Problem:
    default = model_dtype(model) or (DType.BFLOAT16 if device == "cuda" else DType.FLOAT32)
    dtype = default if parsed.dtype is None else DType.parse(parsed.dtype, Setting.DTYPE)
    full = replace(model, layers=model.full_layers)
    if not layers_to_measure(full)[0]:
        raise UsageError(f"{model.name} has no layer with full attention that can be measured, and no others are")
    return Problem(
        full,
        device=device,
        sm=sm,
        dtype=dtype,
        kv_dtype=dtype if parsed.kv_dtype is None else DType.parse(parsed.kv_dtype, Setting.KV_DTYPE),
        page_size=parsed.page_size,
        wants_graphs=device == "cuda",
        speculative_tokens=parsed.speculative_tokens,
        tensor_parallel=parsed.tensor_parallel,
    )


def _hosted(name: str, problem: Problem) -> Problem:
    """The problem as a host poses it."""
    host, _ = load_host(name)
    if refusals := host.refusals(problem):
        raise UsageError(f"{host.title} cannot serve this: {'; '.join(each.format(host.render) for each in refusals)}")
    return host.fit(problem)


class Watched:
    """A bar on standard error while jobs run, on a terminal; elsewhere a line for each failure."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, outcome: Outcome) -> None:
        if isinstance(outcome, Timed):
            point = f"{outcome.side}: {outcome.task.point.role} {outcome.task.point}"
            self._bar.update(self._task, advance=1, description=point)
        else:
            print(told(outcome), file=sys.stderr)


@contextmanager
def watched(jobs: int, *, shown: bool) -> Iterator[Watched]:
    console = Console(stderr=True, highlight=False, markup=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        yield Watched(bar, bar.add_task("measuring", total=jobs))


def told(outcome: Skipped | Failed) -> str:
    """What was not measured, and why, in one line."""
    reason = " ".join(outcome.reason.split())
    if isinstance(outcome, Skipped):
        return f"{outcome.side}: {outcome.task} is left out: {reason}"
    role, shape = outcome.task.point.role, outcome.task.shape
    return f"{outcome.side}: left out for {role} of {shape}, because of {outcome.task.point}: {reason}"


def print_fastest(rows: list[Row]) -> None:
    for title, columns, lines in fastest(rows):
        print(f"\n{title}\n{table(columns, lines)}")


def check_file(path: str | None) -> None:
    """Find out that a file can be written, before there is something to lose."""
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        wrong = "Is a directory"
    elif not os.path.isdir(folder):
        wrong = f"there is no folder {folder}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        wrong = "Permission denied"
    else:
        return
    raise UsageError(f"{path} cannot be written: {wrong}")


def write_text(path: str, text: str) -> None:
    """Write a file that was asked for."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
