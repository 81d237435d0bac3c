"""Measured attention times of prefill steps, by which captured and eager ones are compared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from attnplug_tune.table_writing import versions_of, write_tables

from attnplug import DType, ExtendPath, ForwardMode, Role
from attnplug.auto.table_store import table_path
from attnplug.host import load_model, load_registry
from attnplug.machine.hardware import this_processor
from attnplug.tables import MeasuredShape, MeasuredTable, Measurement
from attnplug_engine import Engine
from attnplug_engine.scheduling.step import Step, StepEntry

POINTS = {(1, 64, 64): 40.0, (1, 256, 256): 90.0, (4, 65, 1): 30.0}
"""(requests, length, tokens) and microseconds of a layer."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("ATTNPLUG_CACHE_DIR", str(tmp_path))


def tune(model: str, **factors: float) -> None:
    """Write prefill tables of torch_native by path, each a multiple of ``POINTS``."""
    here, native = this_processor("cpu"), load_registry().get("torch_native")
    assert here is not None
    layer, tables = load_model(model).layers[0], []
    for name, factor in factors.items():
        path = None if name == "policy" else ExtendPath(name)
        shape = MeasuredShape.of(layer, (DType.FLOAT32, DType.FLOAT32), 64, False, path)
        rows = tuple(Measurement(*point, False, *[time * factor] * 3) for point, time in POINTS.items())
        about = (versions_of(native, here), "2026-11-17")
        tables.append(MeasuredTable(here.name, here.sm, "torch_native", Role.PREFILL, shape, rows, *about))
    write_tables(table_path(here), tables)


def step(*requests: tuple[int, int]) -> Step:
    entries = tuple(StepEntry(None, before, (1,) * new, True) for before, new in requests)
    return Step(ForwardMode.EXTEND, entries, (), ())


def engine(model: str) -> Engine:
    return Engine(model, device="cpu", random_weights=True, dtype="float32", max_batch=4)


def test_mla_is_captured_absorbed_and_runs_eagerly_on_the_policy_s_path() -> None:
    """C1: the times of both are those of its tables, in all layers."""
    model = "tiny:deepseek_v3"
    tune(model, policy=1.0, absorbed=3.0)
    one = engine(model)
    assert one.runner.extend_times is not None
    captured, eager = one.runner.extend_times.seconds(step((0, 256)))
    layers = len(one.runner.spec.full_layers)
    assert math.isclose(eager, 90e-6 * layers, rel_tol=1e-3) and math.isclose(captured, 3 * eager, rel_tol=1e-9)
    mixed = replace(step((64, 1), (0, 256)), mode=ForwardMode.MIXED)
    captured, eager = one.runner.extend_times.seconds(mixed)
    assert captured == eager, "a mixed batch of few tokens runs absorbed, captured or not"


def test_decodes_beside_a_long_chunk_are_compared_apart_from_it() -> None:
    """C1: so that a step that is faster eagerly, in two parts, is not replayed absorbed."""
    model = "tiny:deepseek_v3"
    tune(model, policy=1.0, absorbed=30.0)
    times = engine(model).runner.extend_times
    assert times is not None
    decodes, chunk = [(64, 1)] * 4, (0, 2048)
    captured, eager = times.seconds(replace(step(*decodes, chunk), mode=ForwardMode.MIXED))
    apart, as_mha = times.seconds(step(*decodes))[0], times.seconds(step(chunk))[1]
    assert eager == apart + as_mha < captured


def test_other_layers_have_one_path() -> None:
    tune("tiny:llama", policy=2.0)
    one = engine("tiny:llama")
    assert one.runner.extend_times is not None
    captured, eager = one.runner.extend_times.seconds(step((0, 64), (64, 1), (64, 1)))
    assert captured == eager > 2 * 40e-6


@pytest.mark.parametrize("measured", [{}, {"policy": 1.0}, {"absorbed": 1.0}])
def test_without_one_of_both_nothing_is_compared(measured: dict[str, float]) -> None:
    model = "tiny:deepseek_v3"
    if measured:
        tune(model, **measured)
    assert engine(model).runner.extend_times is None
