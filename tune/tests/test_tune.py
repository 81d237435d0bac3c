"""Tuning with a clock with known times, and once with the real one."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from attnplug_tune import measure, process
from attnplug_tune.clock import HostClock
from attnplug_tune.measure import Failed, Job, Outcome, Skipped, Timed, run_job
from attnplug_tune.points import Point, parse_points
from attnplug_tune.shapes import parse_shapes, tasks_of
from attnplug_tune.stage import Setup, Stage
from attnplug_tune.tuning import Tuned, missing_tasks, tables_of, tune
from tuning import FakeClock, problem, tasks, toys

from attnplug import ExtendPath, ForwardMode, Role
from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.device import Processor
from attnplug.registry.registry import Registry
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_sparse.plugin import attnplug_backends
from attnplug_sparse.torch_sparse.backend import TorchSparseBackend
from attnplug_testing.plugins import Install

FEW = parse_points("1x64,1x256,4x64,1x16+16")
HERE = Processor("a processor", 0)


def job(registry: Registry, name: str, *points: Point, **changes: object) -> Job:
    return replace(Job(name, tasks(registry, name, *(points or FEW)), "cpu", 256), **changes)  # type: ignore[arg-type]


def constant(us: float) -> Callable[[Point], float]:
    return lambda point: us


def measured_by(clock: FakeClock, registry: Registry) -> Callable[[Job], Iterator[Outcome]]:
    return lambda job: run_job(job, registry, clock)


def test_a_measurement_is_the_median_of_a_call_with_its_quartiles(install: Install) -> None:
    registry = toys(install, "toy")
    (timed, *_) = run_job(job(registry, "toy"), registry, FakeClock({"toy": constant(100)}))
    assert isinstance(timed, Timed)
    assert timed.measured[:4] == (1, 64, 1, False) and timed.measured[4:] == pytest.approx((100, 95, 105))


def test_what_lies_between_captured_calls_is_no_part_of_their_time(install: Install, monkeypatch) -> None:
    registry = toys(install, "toy")
    monkeypatch.setattr(measure.Stage, "captured", True)
    monkeypatch.setattr(measure.Stage, "chain", lambda stage, side: replace(stage.links(), side=side))
    clock = FakeClock({"toy": constant(10), "links": constant(1.5)}, runs=True)
    timed, _ = run_job(job(registry, "toy", *FEW[:2]), registry, clock)
    assert isinstance(timed, Timed) and timed.measured.microseconds == pytest.approx(8.5)
    assert [chain.side for chain in clock.ran] == ["links", "toy", "toy"], "they are measured once"


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:deepseek_v3", "tiny:deepseek_v32"])
def test_every_sort_of_layer_runs_in_every_role(model: str, install: Install) -> None:
    """Heads, latent rows, and latent rows that an index chooses; with their new rows written."""
    registry, name = toys(install), "torch_native"
    if model == "tiny:deepseek_v32":
        registry, name = sparse(registry), "torch_sparse"
    points = parse_points("2x70,2x70v3,2x32+8,1x32+8&3x20")
    found = tasks_of(registry.get(name), [problem(model, speculative_tokens=3)], points)
    clock = FakeClock({name: constant(1)}, runs=True)
    outcomes = list(run_job(Job(name, found, "cpu", 128), registry, clock))
    assert [type(outcome) for outcome in outcomes] == [Timed] * 4


def sparse(registry: Registry) -> Registry:
    """``torch_sparse``, which no test package provides."""
    native = registry.get("torch_native")
    return Registry({"torch_sparse": replace(native, spec=attnplug_backends()[0])})


def test_a_hosts_index_has_selected_the_rows_before_the_timed_calls(install: Install, monkeypatch) -> None:
    """D1, A10: prefills, too, get absorbed queries, distinct visible rows, and no index keys."""
    registry, seen, attend = sparse(toys(install)), [], TorchSparseBackend.attend

    def watched(self, q, layer, plan, new, extras):
        seen.append((q.shape[0], q.shape[2], new is None, extras.selected.positions.clone()))
        return attend(self, q, layer, plan, new, extras)

    monkeypatch.setattr(TorchSparseBackend, "attend", watched)
    given = problem("tiny:deepseek_v32", speculative_tokens=3)
    layers = (replace(layer, indexer=replace(layer.indexer, shares=0)) for layer in given.model.layers)
    hosted = replace(given, model=replace(given.model, layers=tuple(layers)))
    points = parse_points("2x70,2x70v3,2x32+8")
    found = tasks_of(registry.get("torch_sparse"), [hosted], points)
    assert all(task.shape.hosted and task.shape.topk for task in found)
    own = tasks_of(registry.get("torch_sparse"), [given], points)
    assert not {task.shape for task in found} & {task.shape for task in own}
    clock = FakeClock({"torch_sparse": constant(1)}, runs=True)
    outcomes = list(run_job(Job("torch_sparse", found, "cpu", 128), registry, clock))
    assert [each.task.point.role for each in outcomes if isinstance(each, Timed)] == [Role.DECODE] * 2 + [Role.PREFILL]
    dims, topk = found[0].layer.mla, found[0].layer.indexer.topk
    assert {rows for rows, *_ in seen} == {2, 6, 16}
    for rows, width, cached, positions in seen:
        new, length = {2: (1, 70), 6: (3, 70), 16: (8, 40)}[rows]
        assert cached and width == dims.kv_lora_rank + dims.qk_rope_head_dim
        for row, chosen in enumerate(positions.tolist()):
            visible = length - new + row % new + 1
            kept = [position for position in chosen if position >= 0]
            assert len(set(kept)) == len(kept) == min(topk, visible) and max(kept) < visible


def noted(calls: list[str], name: str, run: Callable[..., object]) -> Callable[..., object]:
    def call(*given: object, **more: object) -> object:
        calls.append(name)
        return run(*given, **more)

    return functools.wraps(run)(call)


@pytest.mark.parametrize("path", [None, *ExtendPath])
def test_an_mla_prefill_takes_the_path_that_its_table_names(path: ExtendPath | None, install: Install, monkeypatch):
    """C1: with its up-projections. Without a path, the policy's is measured: one-shot, as there is no prefix."""
    calls: list[str] = []
    for hook in ("forward_extend", "forward_ragged"):
        monkeypatch.setattr(TorchNativeBackend, hook, noted(calls, hook, getattr(TorchNativeBackend, hook)))
    registry = toys(install)
    wanted = problem("tiny:deepseek_v3", mla_extend=path)
    found = tasks_of(registry.get("torch_native"), [wanted], parse_points("1x0+8,1x8"))
    assert [task.shape.path for task in found] == [path, None], "decodes have no path"
    clock = FakeClock({"torch_native": constant(1)}, runs=True)
    (outcome,) = run_job(Job("torch_native", found[:1], "cpu", 128), registry, clock)
    assert isinstance(outcome, Timed)
    assert set(calls) == {"forward_extend" if path is ExtendPath.ABSORBED else "forward_ragged"}
    (table,) = tables_of(Tuned("torch_native", 1, [outcome]), HERE, {"torch": "2"}, "2026-11-17")
    assert table.shape.path is path and missing_tasks(found, "torch_native", [table]) == found[1:]
    others = tasks_of(registry.get("torch_native"), [problem("tiny:deepseek_v3", mla_extend=ExtendPath.CHUNKED)], FEW)
    assert path is ExtendPath.CHUNKED or table.shape not in {task.shape for task in others if task.point.tokens > 1}


def test_decodes_of_a_mixed_batch_are_absorbed_as_in_an_engine(install: Install, monkeypatch) -> None:
    """C1: their prefixes are long enough for the policy to run a plain extend as MHA."""
    calls: list[str] = []
    for hook in ("forward_extend", "forward_ragged"):
        monkeypatch.setattr(TorchNativeBackend, hook, noted(calls, hook, getattr(TorchNativeBackend, hook)))
    registry = toys(install)
    for point, hook in (("2x4096+1", "forward_extend"), ("2x4096+2", "forward_ragged")):
        calls.clear()
        found = tasks_of(registry.get("torch_native"), [problem("tiny:deepseek_v3")], parse_points(point))
        clock = FakeClock({"torch_native": constant(1)}, runs=True)
        (outcome,) = run_job(Job("torch_native", found, "cpu", 128), registry, clock)
        assert isinstance(outcome, Timed) and set(calls) == {hook}


def test_a_mixed_batch_has_decodes_beside_its_prefills(install: Install) -> None:
    """The batch is planned as one: rows of prefills, then one row of each decode."""
    registry = toys(install)
    (task,) = tasks_of(registry.get("torch_native"), [problem()], parse_points("2x8+4&3x20"))
    stage = Stage(task, Setup(torch.device("cpu"), 64), measure._builder(job(registry, "torch_native"), registry, task))
    geometry = stage.batch(captured=False).geometry
    assert geometry.mode is ForwardMode.MIXED and geometry.rows == task.point.rows == 11
    assert tuple(geometry.query_lens) == (4, 4, 1, 1, 1) and tuple(geometry.kv_lens) == (12, 12, 20, 20, 20)


def test_a_long_prefill_is_timed_by_a_single_call(install: Install, monkeypatch) -> None:
    registry = toys(install)
    monkeypatch.setattr("attnplug_tune.stage._LONG_PAIRS", 100)
    clock = FakeClock({"torch_native": constant(1)})
    list(run_job(job(registry, "torch_native", *parse_points("1x0+10,1x0+11")), registry, clock))
    assert [chain.calls for chain in clock.ran] == [4, 1]


@pytest.mark.parametrize("apart", [True, False])
def test_where_a_host_absorbs_queries_come_in_parts_and_rows_are_there(apart: bool, install: Install, monkeypatch):
    """D1: the timed calls are those of this host. Queries are joined for a backend that does not take them in parts."""
    native = toys(install).get("torch_native")
    extras = native.spec.capabilities.extras | ({"q_rope"} if apart else set())
    able = replace(native, spec=replace(native.spec, capabilities=replace(native.spec.capabilities, extras=extras)))
    seen, attend = set(), TorchNativeBackend.attend

    def watched(self, q, layer, plan, new, extras):
        seen.add((q.shape[2], None if extras.q_rope is None else extras.q_rope.shape[2], new is None))
        q = q if extras.q_rope is None else torch.cat((q, extras.q_rope), -1)
        return attend(self, q, layer, plan, new, extras)

    monkeypatch.setattr(TorchNativeBackend, "attend", watched)
    given = problem("tiny:deepseek_v3", mla_by_host=True, speculative_tokens=3)
    found = tasks_of(able, [given], parse_points("2x70,2x70v3,2x32+8"))
    assert [task.point.role for task in found] == [Role.DECODE] * 2, "the host prefills"
    assert all(task.shape.hosted for task in found)
    clock = FakeClock({"torch_native": constant(1)}, runs=True)
    outcomes = list(run_job(Job("torch_native", found, "cpu", 128), Registry({"torch_native": able}), clock))
    assert [type(outcome) for outcome in outcomes] == [Timed] * 2
    dims = found[0].layer.mla
    latent, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    assert seen == {(latent, rope, True) if apart else (latent + rope, None, True)}


@pytest.mark.parametrize("by_host", [True, False])
def test_auto_is_chosen_by_tables_of_the_host_that_is_measured(by_host: bool, install: Install, monkeypatch) -> None:
    registry, seen, rank = toys(install), [], measure.default_ranking

    def watched(registry, problem, **more):
        seen.append(problem.mla_by_host)
        return rank(registry, problem, **more)

    monkeypatch.setattr(measure, "default_ranking", watched)
    given = problem("tiny:deepseek_v3", mla_by_host=by_host)
    found = tasks_of(registry.get("torch_native"), [given], parse_points("1x64"))
    (timed,) = run_job(Job("auto", found, "cpu", 128), registry, FakeClock({"auto": constant(1)}, runs=True))
    assert isinstance(timed, Timed) and seen == [by_host]


def test_requests_that_differ_have_the_mean_of_their_point(install: Install) -> None:
    registry = toys(install)
    clock = FakeClock({"torch_native": constant(1)}, runs=True)
    ragged = job(registry, "torch_native", *parse_points("4x~64"))
    (timed,) = run_job(ragged, registry, clock)
    assert isinstance(timed, Timed) and timed.measured[:4] == (4, 64, 1, True)
    assert timed.task.point.lengths == (32, 53, 75, 96)


def test_tables_of_what_was_measured_say_where_backends_cross(install: Install) -> None:
    """Third-party backends take part without doing anything."""
    registry = toys(install, "flat", "steep")
    clock = FakeClock({"flat": constant(80), "steep": lambda point: point.length / 2})
    jobs = [job(registry, name, *parse_points("1x64,1x256")) for name in ("flat", "steep")]
    results = tune(jobs, 100, measured_by(clock, registry))
    tables = [table for each in results for table in tables_of(each, HERE, {"torch": "2"}, "2026-11-16")]
    times = {table.backend: {row[:4]: row.microseconds for row in table.rows} for table in tables}
    schedule = BackendSchedule(times)
    assert [schedule.fastest(1, length, 1) for length in (64, 159, 161, 256)] == ["steep", "steep", "flat", "flat"]
    assert {table.role for table in tables} == {Role.DECODE} and {table.device for table in tables} == {"a processor"}


def test_a_budget_is_shared_evenly_and_covers_the_first_points_of_all(install: Install) -> None:
    registry = toys(install, "one", "other")
    clock = FakeClock({"one": constant(1), "other": constant(1)}, seconds=1.0)
    results = tune([job(registry, name) for name in ("one", "other")], 4, measured_by(clock, registry))
    assert [len(each.timed) for each in results] == [2, 2] and [each.left for each in results] == [2, 2]
    assert [timed.task.point for timed in results[1].timed] == list(FEW[:2])


def test_what_one_backend_leaves_of_the_budget_is_for_the_next(install: Install) -> None:
    registry = toys(install, "quick", "slow")
    clock = FakeClock({"quick": constant(1), "slow": constant(1)}, seconds=1.0)
    jobs = [job(registry, "quick", FEW[0]), job(registry, "slow")]
    assert [len(each.timed) for each in tune(jobs, 5, measured_by(clock, registry))] == [1, 4]


def test_compiling_is_reported_and_is_no_part_of_the_budget(install: Install) -> None:
    registry = toys(install, "jit")
    clock = FakeClock({"jit": constant(1)}, seconds=1.0, compile_s=60.0)
    (tuned,) = tune([job(registry, "jit")], 4, measured_by(clock, registry))
    assert len(tuned.timed) == 4 and tuned.compile_s == 60


def test_a_broken_backend_is_reported_and_left_out_for_that_role_alone(install: Install, monkeypatch) -> None:
    """D2: other backends are still measured."""
    registry = toys(install, "broken", "good")
    chain = measure.Stage.chain

    def fail(stage: measure.Stage, side: str) -> object:
        if side == "broken" and stage.task.point == FEW[1]:
            raise RuntimeError("illegal\ninstruction")
        return chain(stage, side)

    monkeypatch.setattr(measure.Stage, "chain", fail)
    clock = FakeClock({"broken": constant(1), "good": constant(1)})
    broken, good = tune([job(registry, name) for name in ("broken", "good")], 100, measured_by(clock, registry))
    (failed,) = broken.failed
    assert failed.task is not None and failed.task.point == FEW[1] and "illegal" in failed.reason
    assert {role for role, _ in broken.rows()} == {Role.PREFILL}, "what it had measured of decoding is left out too"
    assert not good.failed and len(good.timed) == len(FEW)


def test_results_that_are_not_finite_are_a_failure(install: Install, monkeypatch) -> None:
    registry = toys(install, "wild")
    monkeypatch.setattr(torch, "randn", lambda *dims, **kw: torch.full(dims, float("nan"), **kw))
    outcomes = list(run_job(job(registry, "wild", FEW[0]), registry, FakeClock({"wild": constant(1)}, runs=True)))
    assert isinstance(outcomes[0], Failed) and "finite" in outcomes[0].reason


@pytest.mark.parametrize("gives", [lambda q: None, lambda q: q[:1], lambda q: q.flatten(1)])
def test_what_gives_no_attention_is_a_failure_however_fast_it_is(gives, install: Install, monkeypatch) -> None:
    monkeypatch.setattr(TorchNativeBackend, "forward_decode", lambda self, q, *_, **__: gives(q))
    registry = toys(install, "toy")
    (failed,) = run_job(
        job(registry, "toy", Point(Role.DECODE, 4, 64)), registry, FakeClock({"toy": constant(1)}, runs=True)
    )
    assert isinstance(failed, Failed) and "(4, 4, 16)" in failed.reason


@pytest.mark.parametrize("kind", [SystemExit, BaseException])
def test_a_backend_that_raises_a_base_exception_is_a_failure(kind, install: Install, monkeypatch) -> None:
    def exits(*_: object, **__: object) -> None:
        raise kind("no licence")

    monkeypatch.setattr(TorchNativeBackend, "forward_decode", exits)
    registry = toys(install, "toy")
    (failed,) = run_job(
        job(registry, "toy", Point(Role.DECODE, 4, 64)), registry, FakeClock({"toy": constant(1)}, runs=True)
    )
    assert isinstance(failed, Failed) and "no licence" in failed.reason


def test_a_point_that_does_not_fit_is_left_out_and_the_backend_is_not(install: Install, monkeypatch) -> None:
    registry = toys(install, "toy")
    monkeypatch.setattr(measure, "memory_of", lambda device: 1 << 20)
    found = list(run_job(job(registry, "toy", *parse_points("64x4k,1x64")), registry, FakeClock({"toy": constant(1)})))
    assert [type(each) for each in found] == [Skipped, Timed] and "GiB" in found[0].reason


def test_points_that_a_table_has_are_not_measured_again(install: Install) -> None:
    registry = toys(install, "toy", "other")
    first = Tuned("toy", 2, list(run_job(job(registry, "toy", *FEW[:2]), registry, FakeClock({"toy": constant(1)}))))
    tables = tables_of(first, HERE, {"torch": "2"}, "2026-11-16")
    assert [task.point for task in missing_tasks(tasks(registry, "toy", *FEW), "toy", tables)] == list(FEW[2:])
    assert len(missing_tasks(tasks(registry, "other", *FEW), "other", tables)) == len(FEW)


def test_what_was_measured_before_an_interrupt_is_kept(install: Install) -> None:
    registry = toys(install, "toy")
    kept: list[int] = []

    def interrupted(job: Job) -> Iterator[Outcome]:
        yield next(run_job(job, registry, FakeClock({"toy": constant(1)})))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune([job(registry, "toy")], 9, interrupted, finished=lambda tuned: kept.append(len(tuned.timed)))
    assert kept == [1]


def test_shapes_are_layers_of_their_own() -> None:
    mla, gqa = (model.layers[0] for model in parse_shapes("mla:128, gqa:32/8x64w4096"))
    assert mla.mla is not None and (mla.num_heads, mla.mla.row_dim, mla.head_dim) == (128, 576, 192)
    assert (gqa.num_heads, gqa.num_kv_heads, gqa.head_dim, gqa.sliding_window) == (32, 8, 64, 4096)


def test_torch_native_is_tuned_by_the_real_clock(install: Install) -> None:
    registry = toys(install)
    measured = job(registry, "torch_native", *parse_points("1x64,1x8+8"))
    found = list(run_job(measured, registry, HostClock(torch.device("cpu"))))
    assert [type(each) for each in found] == [Timed, Timed]
    assert all(each.measured.low <= each.measured.microseconds <= each.measured.high for each in found)


def test_a_backend_that_hangs_is_ended_and_left_out(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the rest of its points would take as long, one after the other."""
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(process.multiprocessing, "get_context", lambda method: forking)
    monkeypatch.setattr(process, "_work", lambda job, sender: time.sleep(60))
    monkeypatch.setattr(process, "SILENT_S", 0.2)
    (outcome,) = process.in_own_process(job(toys(install, "toy"), "toy"))
    assert isinstance(outcome, Failed) and "nothing came of it for 0 s, so it was ended" in outcome.reason
