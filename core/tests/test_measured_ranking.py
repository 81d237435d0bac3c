"""Choice of ``auto`` by measured times, and its explanation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attnplug_tune.table_writing import write_tables

from attnplug import DType, ExtendPath, Feature, GraphLevel, Problem, RefusalCode, Role
from attnplug.auto.ranking import default_ranking
from attnplug.auto.schedule import ExtendSchedule
from attnplug.auto.table_store import table_path
from attnplug.declare.errors import PluginError, TableWarning
from attnplug.host import BackendRequest, load_model, select
from attnplug.registry.selection import explanation
from attnplug.tables import MeasuredShape
from attnplug_testing.errors import raises_naming
from support.board import (
    BOARD,
    CROSSING,
    INSTALLED,
    PROBLEM,
    SHAPE,
    chosen,
    crossing,
    decode,
    failure,
    shipping,
    table,
)
from support.selection import DEEPSEEK, LLAMA, MHA, MLA, PLAIN, backend, registry

pytestmark = pytest.mark.usefixtures("board")


def test_without_tables_preference_decides() -> None:
    assert decode(chosen()) == ["other"]


def test_measured_times_decide_and_are_explained() -> None:
    """D3: the geometric mean over all points; what was not measured comes last, and is named."""
    selection = chosen(*crossing())
    assert decode(selection) == ["late"]
    assert selection.choices[Role.DECODE].why() == (
        "auto: the fastest of 2 at 2 points; late 10.0 µs, early 20.0 at 1 × 4096; table of 2026-11-16, measured on "
        "this machine; not measured: other ('attnplug tune' measures)"
    )
    assert selection.chosen(Role.PREFILL).spec.name == "other"  # prefill was not measured


def test_a_host_that_plans_by_batch_gets_a_schedule() -> None:
    selection = chosen(*crossing(), per_batch=True)
    assert decode(selection) == ["late", "early"]
    schedule = selection.choices[Role.DECODE].schedule
    assert schedule is not None
    assert [schedule.fastest(1, length, 1) for length in (128, 4096)] == ["early", "late"]
    lines = list(explanation(selection))
    assert any(
        line.startswith("decode: late or early (auto: late and early by batch, the fastest of 2") for line in lines
    )
    (upto,) = (end for end, name in zip(*schedule.length_ranges(1, 1, False), strict=True) if name == "early")
    assert f"  1 request: early up to {upto} rows, then late" in lines


def test_the_backend_of_a_graph_for_all_lengths_is_named() -> None:
    """D3: the mean of both points; without graphs, by length."""
    able = replace(PLAIN, cuda_graph=GraphLevel.DECODE)
    installed = registry(backend("early", able), backend("late", able))
    for graphs in (True, False):
        problem = replace(PROBLEM, wants_graphs=graphs, graphs_by_length=False)
        selection = chosen(*crossing(), installed=installed, problem=problem, per_batch=True)
        schedule = selection.choices[Role.DECODE].schedule
        assert schedule is not None
        first = "late in a graph; without, " if graphs else ""
        assert f"  8 requests: {first}{schedule.describe(8, 1)}" in explanation(selection)


def test_what_a_host_prefills_by_its_own_calls_has_one_backend() -> None:
    """C1: the host chunks and merges MLA itself. Its decode has a backend per batch."""
    able = replace(PLAIN, kinds={"mla"}, mla_extend={"one_shot", "chunked"})
    installed = registry(backend("early", able), backend("late", able))
    shape = MeasuredShape.of(MLA, (DType.BFLOAT16, DType.BFLOAT16), 64, False)
    write_tables(
        table_path(BOARD), [one for role in (Role.PREFILL, Role.DECODE) for one in crossing(shape=shape, role=role)]
    )
    for by_host in (True, False):
        problem = replace(PROBLEM, model=DEEPSEEK, mla_by_host=by_host)
        ranking = default_ranking(installed, problem, per_batch=True)
        selection = select(installed, BackendRequest(roles={Role.PREFILL: "auto"}), problem, ranking=ranking)
        assert decode(selection) == ["late", "early"]
        assert (selection.choices[Role.PREFILL].schedule is None) is by_host


def test_a_backend_that_is_hardly_better_anywhere_is_not_scheduled() -> None:
    """Fewer backends hold less memory; one percent is less than times scatter."""
    third = table("other", {(1, 128, 1): 4.97, (1, 4096, 1): 9.95})
    assert decode(chosen(*crossing(), third, per_batch=True)) == ["other"]


def test_the_choice_depends_on_the_tables_and_not_on_their_order() -> None:
    tables = [*crossing(), table("other", CROSSING["early"])]
    first = [each.spec.name for each in chosen(*tables).choices[Role.DECODE].serving]
    table_path(BOARD).unlink()
    assert [each.spec.name for each in chosen(*reversed(tables)).choices[Role.DECODE].serving] == first == ["late"]


@pytest.mark.parametrize("point", [(1, 9000, 1), (1, 128, 4)])
def test_batches_that_the_problem_does_not_have_say_nothing(point: tuple[int, int, int]) -> None:
    """The context ends at 4096 rows, and nothing is verified."""
    early = table("early", {**CROSSING["early"], point: 1.0})
    late = table("late", {**CROSSING["late"], point: 1000.0})
    assert decode(chosen(early, late)) == ["late"]


def test_verified_batches_count_where_there_is_speculation() -> None:
    able = replace(PLAIN, max_speculative_tokens=4, roles=set(Role) - {Role.LINEAR})
    installed = registry(backend("early", able), backend("late", able))
    early = table("early", {**CROSSING["early"], (1, 128, 4): 1.0})
    late = table("late", {**CROSSING["late"], (1, 128, 4): 1000.0})
    assert decode(chosen(early, late, installed=installed, problem=replace(PROBLEM, speculative_tokens=3))) == ["early"]


def test_layers_of_several_shapes_count_as_often_as_they_are_there() -> None:
    windowed = replace(MHA, layer_id=1, sliding_window=128)
    model = replace(LLAMA, layers=(MHA, *(replace(windowed, layer_id=n) for n in (1, 2, 3))))
    narrow = replace(SHAPE, window=128)
    tables = [
        table("early", {(1, 4096, 1): 8.0}),
        table("late", {(1, 4096, 1): 4.0}),
        table("early", {(1, 4096, 1): 2.0}, shape=narrow),
        table("late", {(1, 4096, 1): 4.0}, shape=narrow),
    ]
    able = replace(PLAIN, features={Feature.SLIDING_WINDOW})
    installed = registry(backend("early", able), backend("late", able))
    why = chosen(*tables, installed=installed, problem=replace(PROBLEM, model=model)).choices[Role.DECODE].why()
    assert "early 3.5 µs, late 4.0 at 1 × 4096" in why  # (8 + 3 × 2) / 4


def test_a_rank_has_the_times_of_its_own_heads() -> None:
    own = replace(SHAPE, num_heads=4, num_kv_heads=1)
    why = (
        chosen(*crossing(), *crossing(shape=own), problem=replace(PROBLEM, tensor_parallel=2))
        .choices[Role.DECODE]
        .why()
    )
    assert "nearest" not in why


def test_the_nearest_shape_stands_for_one_that_was_not_measured() -> None:
    """All backends are compared at one shape: the nearest at which two were measured."""
    near, far = replace(SHAPE, num_heads=16), replace(SHAPE, num_heads=32)
    tables = [*crossing(shape=far), *crossing(shape=near), table("late", {(1, 128, 1): 1.0})]
    why = chosen(*tables).choices[Role.DECODE].why()
    assert why.split("; ")[3] == f"nearest shape: {near}"
    assert "late 10.0" in why


def test_where_a_host_absorbs_what_was_measured_so_comes_first() -> None:
    """C1: joining the parts of queries costs some backends more than others. Without such times, those of the same
    heads count."""
    able = replace(PLAIN, kinds={"mla"}, mla_extend={"one_shot", "chunked"})
    installed = registry(backend("early", able), backend("late", able))
    ours = MeasuredShape.of(MLA, (DType.BFLOAT16, DType.BFLOAT16), 64, False)
    problem = replace(PROBLEM, model=DEEPSEEK, mla_by_host=True)
    others = crossing(shape=replace(ours, num_heads=2 * ours.num_heads, hosted=True))
    found = chosen(*crossing(shape=ours), *others, installed=installed, problem=problem)
    assert f"nearest shape: {ours}" in found.choices[Role.DECODE].why()
    swapped = {"early": CROSSING["late"], "late": CROSSING["early"]}
    hosted = [table(name, times, shape=replace(ours, hosted=True)) for name, times in swapped.items()]
    assert decode(chosen(*hosted, installed=installed, problem=problem)) == ["early"]
    assert decode(chosen(installed=installed, problem=replace(problem, mla_by_host=False))) == ["late"]


def test_a_host_absorbs_what_its_index_selects() -> None:
    """A10: then no layer has an index of its own. Layers that share another layer's, or whose entries have one, do not
    make a host of the engine."""
    sparse, entries = load_model("tiny:deepseek_v32"), load_model("tiny:deepseek_v4")
    shared = [replace(layer, indexer=replace(layer.indexer, shares=0)) for layer in sparse.layers]
    found = {
        "own": sparse,
        "some": replace(sparse, layers=(sparse.layers[0], *shared[1:])),
        "all": replace(sparse, layers=tuple(shared)),
        "entries": entries,
        "none": load_model("tiny:deepseek_v3"),
    }
    assert [name for name, model in found.items() if replace(PROBLEM, model=model).absorbed_by_host] == ["all"]


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, kv_dtype=DType.FLOAT8_E4M3),
        replace(SHAPE, dtype=DType.FLOAT16),
        replace(SHAPE, window=128),
        replace(SHAPE, num_heads=128),
    ],
)
def test_a_shape_too_far_away_says_nothing(shape: MeasuredShape) -> None:
    assert decode(chosen(*crossing(shape=shape))) == ["other"]


def test_times_at_another_page_size_count() -> None:
    tables = [table("early", {(1, 128, 1): 5.0}), table("late", {(1, 128, 1): 4.0}, shape=replace(SHAPE, page_size=1))]
    assert decode(chosen(*tables)) == ["late"]


def test_the_embedded_default_does_not_win_by_being_measured_alone() -> None:
    """D3: it is the one that is always there, and hardly ever the fastest."""
    installed = registry(backend("default", target="attnplug.default"), backend("early"))
    alone = table("default", {(1, 128, 1): 5.0})
    assert decode(chosen(alone, installed=installed)) == ["early"]
    both = table("early", {(1, 128, 1): 6.0})
    assert decode(chosen(both, installed=installed)) == ["default"]


def test_a_backend_that_was_measured_alone_does_not_win_by_that() -> None:
    """Times of one backend say nothing about unmeasured ones, so the preferences decide."""
    assert decode(chosen(table("early", {(1, 128, 1): 5.0}))) == ["other"]
    assert decode(chosen(table("late", {(1, 128, 1): 6.0}))) == ["early"]


def test_a_backend_that_failed_here_is_refused_with_what_happened() -> None:
    """D3: a backend that failed while it was measured is refused with that error. This holds for any preference, and
    without a comparison to other backends."""
    found = chosen(failure("other"), table("early", {(1, 128, 1): 5.0})).choices[Role.DECODE]
    assert found.chosen_name == "early" and found.why().endswith("; 1 refused")
    ((refusal,),) = (each.refusals for each in found.candidates if each.refusals)
    assert refusal.code == RefusalCode.MEASURED and "on 2026-11-16: at 1 × 64, RuntimeError: boom" in refusal.message
    assert chosen().choices[Role.PREFILL].chosen_name == "other"


def test_a_backend_that_failed_is_not_taken_because_it_alone_is_captured() -> None:
    """D3"""
    captured = replace(PLAIN, cuda_graph=GraphLevel.DECODE)
    installed = registry(backend("early", captured), backend("late"))
    assert decode(chosen(installed=installed, problem=replace(PROBLEM, wants_graphs=True))) == ["early"]
    found = chosen(failure("early"), installed=installed, problem=replace(PROBLEM, wants_graphs=True))
    assert decode(found) == ["late"]


def test_where_all_failed_the_preferred_one_is_taken_and_that_is_explained() -> None:
    """A table never keeps a model from running."""
    found = chosen(*map(failure, ("early", "late", "other"))).choices[Role.DECODE]
    assert found.chosen_name == "other" and "; but it failed when it was measured" in found.why()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shape": replace(SHAPE, num_heads=16)}, PROBLEM),
        ({}, replace(PROBLEM, page_size=32)),
        ({"versions": {"other-dist": "1.1"}}, PROBLEM),
    ],
    ids=["other heads", "other pages", "other versions"],
)
@pytest.mark.filterwarnings("ignore:.*a failure of other is not used. measured with other-dist 1.1")
def test_a_failure_at_something_else_says_nothing(changes: dict[str, Any], problem: Problem) -> None:
    assert decode(chosen(failure("other", **changes), problem=problem)) == ["other"]


def test_a_failure_that_a_plugin_ships_is_not_used(tmp_path: Path) -> None:
    """It was on another machine."""
    with pytest.warns(TableWarning, match=r"\bother\b.*this machine"):
        assert decode(chosen(installed=shipping(tmp_path, failure("other")))) == ["other"]


def test_a_draft_is_ranked_by_its_decoding() -> None:
    problem = replace(PROBLEM, is_draft=True, speculative_tokens=2)
    able = replace(
        INSTALLED.backends["early"].spec.capabilities, roles=set(Role) - {Role.LINEAR}, max_speculative_tokens=4
    )
    installed = registry(backend("early", able), backend("late", able), backend("other", able, preference=100))
    selection = chosen(*crossing(), installed=installed, problem=problem, per_batch=True)
    assert [each.spec.name for each in selection.serving(Role.DRAFT)] == ["late"]


class TestPrefill:
    TIMES: ClassVar = {
        "early": {(1, 64, 64): 5.0, (1, 4096, 4096): 200.0, (8, 4097, 1): 30.0},
        "late": {(1, 64, 64): 8.0, (1, 4096, 4096): 100.0, (8, 4097, 1): 60.0},
    }

    def test_each_extend_has_its_fastest_backend(self) -> None:
        selection = chosen(*(table(name, t, Role.PREFILL) for name, t in self.TIMES.items()), per_batch=True)
        schedule = selection.choices[Role.PREFILL].schedule
        assert isinstance(schedule, ExtendSchedule)
        assert [schedule.fastest(1, length, length) for length in (64, 3000)] == ["early", "late"]
        assert any(line.startswith("  1 × 4096 new tokens: ") for line in explanation(selection))
        assert "at 1 × 4096 (4096 new)" in selection.choices[Role.PREFILL].why(), "a prompt, not a decode"

    @pytest.mark.parametrize("path", [None, ExtendPath.ABSORBED])
    def test_a_path_that_was_asked_for_is_compared_by_its_own_times(self, path: ExtendPath | None) -> None:
        """C1: on the absorbed path, the other backend is faster."""
        shape = MeasuredShape.of(MLA, (DType.BFLOAT16, DType.BFLOAT16), 64, False)
        able = replace(PLAIN, kinds=frozenset({MLA.kind}), mla_dims=frozenset({(512, 64)}))
        installed = registry(backend("early", able), backend("late", able))
        point = (1, 512, 512)
        tables = [
            table(name, {point: time}, Role.PREFILL, shape=replace(shape, path=of))
            for of, times in ((None, (1.0, 2.0)), (ExtendPath.ABSORBED, (4.0, 3.0)))
            for name, time in zip(("early", "late"), times, strict=True)
        ]
        problem = replace(PROBLEM, model=DEEPSEEK, mla_extend=path)
        found = chosen(*tables, installed=installed, problem=problem).chosen(Role.PREFILL)
        assert found.spec.name == ("early" if path is None else "late")

    @pytest.mark.parametrize("changes", [{"path": "sideways"}, {"kind": "mha", "path": "absorbed"}])
    def test_a_path_that_cannot_be_is_refused(self, changes: dict[str, Any]) -> None:
        shape = MeasuredShape.of(MLA, (DType.BFLOAT16, DType.BFLOAT16), 64, False)
        with raises_naming(PluginError, "path", changes["path"]):
            replace(shape, **changes)
