"""What ``auto`` takes by measured times, of what it finds, and what it says about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from attnplug import (
    AttentionKind,
    DType,
    Feature,
    GraphLevel,
    LayerShape,
    MeasuredTable,
    Measurement,
    Problem,
    RefusalCode,
    Role,
)
from attnplug.choose.loading import Provided, Source
from attnplug.choose.measured import store
from attnplug.choose.measured.files import TableError
from attnplug.choose.measured.ranking import _told, default_ranking
from attnplug.choose.measured.store import file_states, table_files
from attnplug.declare.installed import installed_version
from attnplug.host import (
    BackendRequest,
    Processor,
    Registry,
    Selection,
    TableWarning,
    explanation,
    load_tables,
    read_tables,
    select,
    table_path,
    versions_of,
    write_tables,
)
from attnplug.machine.hardware import _cpu_name
from support.command import Attnplug, Package
from support.selection import DEEPSEEK, LLAMA, MHA, MLA, PLAIN, backend, registry

BOARD = Processor("Acme Board 3", 90, "580.1")
SHAPE = LayerShape(AttentionKind.MHA, 8, 2, 64, 64, DType.BFLOAT16, DType.BFLOAT16, 64)
PROBLEM = Problem(LLAMA, "cuda", 90, DType.BFLOAT16)
INSTALLED = registry(backend("early"), backend("late"), backend("other", preference=100))
TORCH = str(installed_version("torch"))

Times = Mapping[tuple[int, int, int], float]
CROSSING: dict[str, Times] = {
    "early": {(1, 128, 1): 5.0, (1, 4096, 1): 20.0},
    "late": {(1, 128, 1): 8.0, (1, 4096, 1): 10.0},
}


def table(name: str, times: Times, role: Role = Role.DECODE, **changes: Any) -> MeasuredTable:
    rows = tuple(Measurement(*point, False, time, time, time) for point, time in times.items())
    fields = {"shape": SHAPE, "versions": {f"{name}-dist": "1.2"}, "measured": "2026-11-16", **changes}
    return MeasuredTable(BOARD.name, BOARD.sm, name, role, rows=rows, **fields)


def crossing(**changes: Any) -> list[MeasuredTable]:
    return [table(name, times, **changes) for name, times in CROSSING.items()]


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has a board of which nothing ships, and a user who measured nothing yet."""
    for command in ("backends", "doctor", "explain"):  # imported later, they would keep the board
        import_module(f"attnplug.cli.{command}")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("attnplug.machine.hardware.visible_gpus", lambda: (BOARD,))


def chosen(
    *tables: MeasuredTable, installed: Registry = INSTALLED, problem: Problem = PROBLEM, per_batch: bool = False
) -> Selection:
    """The choice after these were measured on this machine."""
    if tables:
        write_tables(table_path(BOARD), tables)
    ranking = default_ranking(installed, problem, per_batch=per_batch)
    return select(installed, BackendRequest(), problem, ranking=ranking)


def decode(selection: Selection) -> list[str]:
    return [each.spec.name for each in selection.serving(Role.DECODE)]


def test_without_tables_preference_decides() -> None:
    assert decode(chosen()) == ["other"]


def test_measured_times_decide_and_are_told() -> None:
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
    schedule = selection.schedule(Role.DECODE)
    assert schedule is not None
    assert [schedule.fastest(1, length, 1) for length in (128, 4096)] == ["early", "late"]
    lines = list(explanation(selection))
    assert any(
        line.startswith("decode: late or early (auto: late and early by batch, the fastest of 2") for line in lines
    )
    (upto,) = (upto for upto, name in schedule.crossings(1, 1) if name == "early")
    assert f"  1 request: early up to {upto} rows, then late" in lines


def test_where_one_graph_serves_all_lengths_it_is_told_who_runs_in_it() -> None:
    """D3: the mean of both points; without graphs, by length."""
    able = replace(PLAIN, cuda_graph=GraphLevel.DECODE)
    installed = registry(backend("early", able), backend("late", able))
    for graphs in (True, False):
        problem = replace(PROBLEM, wants_graphs=graphs, graphs_by_length=False)
        selection = chosen(*crossing(), installed=installed, problem=problem, per_batch=True)
        schedule = selection.schedule(Role.DECODE)
        assert schedule is not None
        first = "late in a graph; without, " if graphs else ""
        assert f"  8 requests: {first}{schedule.told(8, 1)}" in explanation(selection)


def test_what_a_host_prefills_by_its_own_calls_has_one_backend() -> None:
    """C1: it chunks and merges MLA itself. Its decode goes by batch."""
    able = replace(PLAIN, kinds={"mla"}, mla_extend={"one_shot", "chunked"})
    installed = registry(backend("early", able), backend("late", able))
    shape = LayerShape.of(MLA, DType.BFLOAT16, DType.BFLOAT16, 64)
    write_tables(
        table_path(BOARD), [one for role in (Role.PREFILL, Role.DECODE) for one in crossing(shape=shape, role=role)]
    )
    for by_host in (True, False):
        problem = replace(PROBLEM, model=DEEPSEEK, mla_by_host=by_host)
        ranking = default_ranking(installed, problem, per_batch=True)
        selection = select(installed, BackendRequest(roles={Role.PREFILL: "auto"}), problem, ranking=ranking)
        assert decode(selection) == ["late", "early"]
        assert (selection.schedule(Role.PREFILL) is None) is by_host


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


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, kv_dtype=DType.FLOAT8_E4M3),
        replace(SHAPE, dtype=DType.FLOAT16),
        replace(SHAPE, window=128),
        replace(SHAPE, num_heads=128),
    ],
)
def test_a_shape_too_far_away_says_nothing(shape: LayerShape) -> None:
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
    """Its times say nothing of the others'."""
    assert decode(chosen(table("early", {(1, 128, 1): 5.0}))) == ["other"]
    assert decode(chosen(table("late", {(1, 128, 1): 6.0}))) == ["early"]


def failure(name: str, **changes: Any) -> MeasuredTable:
    return table(name, {}, failed="at 1 × 64, RuntimeError: boom", **changes)


def test_a_backend_that_failed_here_is_refused_with_what_happened() -> None:
    """D3: whatever its preference is, and though it was not compared with others."""
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


def test_where_all_failed_the_preferred_one_is_taken_and_that_is_told() -> None:
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


def test_a_failure_that_others_tell_of_is_not_used() -> None:
    """It was on another machine."""
    brought = {"t": Provided(failure("other"), Source("p", "p", "p-dist", "1"))}
    with pytest.warns(TableWarning, match="a failure of other is not used: it was not on this machine"):
        assert decode(chosen(installed=replace(INSTALLED, rankings=brought))) == ["other"]


def test_a_draft_is_ranked_by_its_decoding() -> None:
    problem = replace(PROBLEM, is_draft=True, speculative_tokens=2)
    able = replace(
        INSTALLED.backends["early"].spec.capabilities, roles=set(Role) - {Role.LINEAR}, max_speculative_tokens=4
    )
    installed = registry(backend("early", able), backend("late", able), backend("other", able, preference=100))
    selection = chosen(*crossing(), installed=installed, problem=problem, per_batch=True)
    assert [each.spec.name for each in selection.serving(Role.DRAFT)] == ["late"]


# ---- what holds here ----


def test_a_table_of_this_machine_holds_for_exactly_what_was_measured() -> None:
    versions = versions_of(INSTALLED.backends["late"], BOARD)
    assert versions == {"late-dist": "1.2", "torch": TORCH, "driver": "580.1"}
    write_tables(table_path(BOARD), [table("late", CROSSING["late"], versions=versions)])
    assert load_tables(INSTALLED, BOARD).faults == ()
    (fault,) = load_tables(INSTALLED, replace(BOARD, driver="580.2")).faults
    assert fault == (
        f"{table_path(BOARD)}: times of late are not used: measured with driver 580.1, and 580.2 is here; "
        "'attnplug tune' measures again"
    )


@pytest.mark.parametrize(
    ("versions", "holds"),
    [
        ({"late-dist": "1.2", "torch": f"{TORCH.partition('.')[0]}.0", "driver": "570"}, True),
        ({"late-dist": "1.2", "torch": "1.13"}, False),
        ({"late-dist": "1.1"}, True),
        ({"late-dist": "2.0"}, False),
        ({"late-dist": "1.2", "no-such-library": "3"}, False),
    ],
)
def test_a_table_of_others_holds_for_other_releases_of_torch_the_plugin_and_drivers(
    versions: dict[str, str], holds: bool
) -> None:
    brought = Provided(table("late", CROSSING["late"], versions=versions), Source("t", "t", "tables-dist", "3"))
    found = load_tables(replace(INSTALLED, rankings={"late": brought}), BOARD)
    assert [each.origin.words for each in found.found] == ["brought by tables-dist 3"] * holds
    assert len(found.faults) == (not holds and "no-such-library" not in versions)  # then it cannot be used anyway


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("4.0", "4.1", "measured with extra 4.0, and 4.1 is here"),
        ("4.0", None, "measured with extra 4.0, and it is missing here"),
        (None, "4.1", "measured with extra missing, and it is 4.1 here"),
        (None, None, ""),
    ],
)
def test_a_library_that_a_backend_takes_where_it_is_there_counts(
    before: str | None, after: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as flash-attn-4, without which ``flashattention`` runs on another kernel."""
    installed = registry(backend("late", uses=("extra",)))
    for version in (before, after):
        monkeypatch.setattr(store, "installed_version", {"extra": version, "torch": "2.11"}.get)
        versions = versions_of(installed.get("late"), BOARD)
        if version is before:
            write_tables(table_path(BOARD), [table("late", CROSSING["late"], versions=versions)])
        assert versions.get("extra") == version
    faults = load_tables(installed, BOARD).faults
    assert line in " ".join(faults) and len(faults) == bool(line)


def test_what_the_user_measured_comes_before_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    monkeypatch.setattr(store.shipped, "__file__", str(package / "__init__.py"))
    write_tables(package / table_path(BOARD).name, [*crossing(measured="2026-01-01")])
    assert "table of 2026-01-01, shipped for Acme Board 3" in chosen().choices[Role.DECODE].why()
    words = chosen(table("early", CROSSING["early"])).choices[Role.DECODE].why()
    assert "table of 2026-11-16, measured on this machine and of 2026-01-01, shipped for Acme Board 3" in words


def test_what_ships_can_be_read_and_is_found_by_its_name() -> None:
    for path in Path(store.shipped.__file__).parent.glob("*.json"):
        file = read_tables(path)
        assert path in [each for each, _ in table_files(Processor(file.device, file.sm))]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is not JSON"),
        ('{"schema": 7}', "it has schema 7, and this attnplug reads 3; it is not used"),
        (
            '{"schema": 3, "device": "B", "sm": 80, "tables": []}',
            "measured on B (SM 80), and this is Acme Board 3 (SM 90)",
        ),
    ],
    ids=["corrupt", "another schema", "foreign"],
)
def test_a_file_that_cannot_be_used_is_told_once_in_one_line(content: str, line: str) -> None:
    """Preference decides then, as if it were not there."""
    table_path(BOARD).parent.mkdir(parents=True)
    table_path(BOARD).write_text(content)
    with pytest.warns(TableWarning) as told:
        assert decode(chosen()) == ["other"]
    (warning,) = told
    assert decode(chosen()) == ["other"]  # a second warning would be an error
    assert line in str(warning.message) and "\n" not in str(warning.message)


def test_files_of_other_devices_are_nobodys_business() -> None:
    folder = table_path(BOARD).parent
    folder.mkdir(parents=True)
    (folder / "nvidia-b200.json").write_text("{")
    (folder / "acme-board-3-pro.json").write_text("{")
    assert decode(chosen()) == ["other"]


@pytest.mark.parametrize("changes", [{"sm": 100}, {"device": None}, {"device": "cpu", "sm": None}])
def test_tables_of_this_machine_say_nothing_of_another(changes: dict[str, Any]) -> None:
    assert decode(chosen(*crossing(), problem=replace(PROBLEM, **changes))) == ["other"]


def test_a_variable_turns_tables_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.TABLES_VARIABLE, "off")
    assert decode(chosen(*crossing())) == ["other"]


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"ATTNPLUG_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/tables"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/attnplug/tables"),
        ({"HOME": "/h"}, "/h/.cache/attnplug/tables"),
    ],
)
def test_where_a_users_tables_lie(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTNPLUG_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert table_path(BOARD) == Path(folder) / "acme-board-3.json"


def test_a_user_without_a_home_has_no_tables_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that was started with a user of its own."""

    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    for name in ("ATTNPLUG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert decode(chosen()) == ["other"]
    with pytest.raises(TableError, match="set ATTNPLUG_CACHE_DIR"):
        table_path(BOARD)


def test_a_folder_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as within:
        within.setattr("os.listdir", denied)
        within.setattr("os.stat", denied)
        fault, *_ = load_tables(INSTALLED, BOARD).faults
    assert fault.endswith("tables cannot be read: Permission denied; it is not used")


def test_what_was_measured_last_comes_before_files_beside_it() -> None:
    path = table_path(BOARD)
    beside = path.with_name(f"{path.stem}.before.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in (beside, path):
        each.touch()
    assert [found for found, origin in table_files(BOARD) if origin.own] == [path, beside]


def test_a_report_gives_the_state_of_every_file() -> None:
    """``attnplug doctor`` shows it."""
    outdated = table("other", CROSSING["late"], versions={"other-dist": "0.9"})
    write_tables(table_path(BOARD), [*crossing(), failure("early", role=Role.PREFILL), outdated])
    (state,) = file_states(INSTALLED, BOARD).values()
    used, failed, unused = state.splitlines()
    assert used == "used: 2 tables of early, late"
    assert failed == f"not taken by auto: early for prefill of {SHAPE}, which failed at 1 × 64, RuntimeError: boom"
    assert "measured with other-dist 0.9, and 1.2 is here" in unused


# ---- the command ----


@pytest.mark.usefixtures("plain_environment")
def test_a_third_partys_backend_takes_part_without_doing_anything(attnplug: Attnplug, package: Package) -> None:
    """D1: once it is measured, ``explain`` shows its figures beside the others'."""
    package("acme", fields="{'preference': 100}")
    here = Processor(_cpu_name(), 0)
    shape = replace(SHAPE, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, dtype=DType.FLOAT32)
    arguments = ("explain", "--model", "tiny:llama", "--device", "cpu", "--dtype", "float32")
    assert "decode: acme (auto: preference 100" in attnplug(*arguments).out
    times = {"acme": ("acme-dist", "1.2.3", 30.0), "torch_native": ("torch", TORCH, 20.0)}
    write_tables(
        table_path(here),
        [
            MeasuredTable(
                here.name,
                0,
                name,
                role,
                replace(shape, kv_dtype=DType.FLOAT32),
                ((1, 4096, 1, False, time, time, time),),
                {distribution: version},
                "2026-11-16",
            )
            for name, (distribution, version, time) in times.items()
            for role in (Role.PREFILL, Role.DECODE)
        ],
    )
    outcome = attnplug(*arguments)
    assert outcome.err == ""
    figures = "torch_native 20.0 µs, acme 30.0 at 1 × 4096; table of 2026-11-16, measured on this machine"
    assert figures in outcome.out
    _told.clear()
    table_path(here).write_text("[]")
    outcome = attnplug(*arguments)
    assert outcome.code == 0 and "decode: acme" in outcome.out
    (line,) = outcome.err.splitlines()
    assert line.startswith("warning: ") and line.endswith("; it is not used")
