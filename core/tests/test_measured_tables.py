"""Measured tables that apply to a machine, by origin and versions, and the faults reported for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attnplug_tune import table_writing
from attnplug_tune.table_writing import versions_of, write_tables

from attnplug import DType, Role
from attnplug.auto import table_store as store
from attnplug.auto.ranking import _warned
from attnplug.auto.table_store import TableError, load_tables, read_tables, table_files, table_path
from attnplug.cli.doctor import file_states
from attnplug.declare.device import Processor
from attnplug.declare.errors import TableWarning
from attnplug.machine.hardware import _cpu_name
from attnplug.tables import MeasuredTable
from attnplug_testing.command import Attnplug, Package
from attnplug_testing.errors import raises_naming
from support.board import (
    BOARD,
    CROSSING,
    INSTALLED,
    PROBLEM,
    SHAPE,
    TORCH,
    chosen,
    crossing,
    decode,
    failure,
    shipping,
    table,
)
from support.selection import backend, registry

pytestmark = pytest.mark.usefixtures("board")


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
def test_a_shipped_table_holds_for_other_releases_of_torch_the_plugin_and_drivers(
    versions: dict[str, str], holds: bool, tmp_path: Path
) -> None:
    found = load_tables(shipping(tmp_path, table("late", CROSSING["late"], versions=versions)), BOARD)
    assert [each.origin.words for each in found.found] == ["shipped for Acme Board 3"] * holds
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
    """For example flash-attn-4: without it, ``flashattention`` uses another kernel."""
    installed = registry(backend("late", uses=("extra",)))
    for version in (before, after):
        for module in (store, table_writing):
            monkeypatch.setattr(module, "installed_version", {"extra": version, "torch": "2.11"}.get)
        versions = versions_of(installed.get("late"), BOARD)
        if version is before:
            write_tables(table_path(BOARD), [table("late", CROSSING["late"], versions=versions)])
        assert versions.get("extra") == version
    faults = load_tables(installed, BOARD).faults
    assert line in " ".join(faults) and len(faults) == bool(line)


def test_what_the_user_measured_comes_before_what_ships(tmp_path: Path) -> None:
    installed = shipping(tmp_path / "package", *crossing(measured="2026-01-01"))
    assert "table of 2026-01-01, shipped for Acme Board 3" in chosen(installed=installed).choices[Role.DECODE].why()
    words = chosen(table("early", CROSSING["early"]), installed=installed).choices[Role.DECODE].why()
    assert "table of 2026-11-16, measured on this machine and of 2026-01-01, shipped for Acme Board 3" in words


def test_a_package_vouches_for_tables_of_its_own_backend(tmp_path: Path) -> None:
    """A new major of the package that ships them leaves them valid; one of another package does not."""
    older = table("late", CROSSING["late"], versions={"late-dist": "0.9"})
    assert load_tables(shipping(tmp_path / "own", older, distribution="late-dist"), BOARD).faults == ()
    (fault,) = load_tables(shipping(tmp_path / "foreign", older), BOARD).faults
    assert "measured with late-dist 0.9, and 1.2 is here" in fault


def test_a_table_that_two_plugins_ship_is_not_used_and_both_files_are_named(tmp_path: Path) -> None:
    """D2. Tables that only one of them ships are used."""
    installed = shipping(tmp_path / "a", *crossing())
    installed = shipping(tmp_path / "b", table("late", CROSSING["late"]), installed=installed)
    found = load_tables(installed, BOARD)
    assert [each.table.backend for each in found.found] == ["early"]
    assert len(found.faults) == 2
    for fault in found.faults:
        assert str(tmp_path / "a") in fault and str(tmp_path / "b") in fault


def test_folders_are_read_only_when_a_ranking_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start-up without ``auto`` reads no table, and ``auto`` reads those of this device alone."""
    installed = shipping(tmp_path, *crossing())
    (tmp_path / "nvidia-b200.json").write_text("{")
    read: list[Path] = []
    monkeypatch.setattr(store, "read_tables", lambda path: read.append(path) or read_tables(path))
    chosen(installed=installed)
    assert read == [tmp_path / table_path(BOARD).name]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is not JSON"),
        ('{"schema": 7}', "it has schema 7, and this attnplug reads 5; it is not used: remove it"),
        (
            '{"schema": 5, "device": "B", "sm": 80, "tables": []}',
            "measured on B (SM 80), and this is Acme Board 3 (SM 90)",
        ),
    ],
    ids=["corrupt", "another schema", "foreign"],
)
def test_an_unusable_file_is_reported_once_in_one_line(content: str, line: str) -> None:
    """Preference decides then, as if it were not there."""
    table_path(BOARD).parent.mkdir(parents=True)
    table_path(BOARD).write_text(content)
    with pytest.warns(TableWarning) as caught:
        assert decode(chosen()) == ["other"]
    (warning,) = caught
    assert decode(chosen()) == ["other"]  # a second warning would be an error
    assert line in str(warning.message) and "\n" not in str(warning.message)


def test_files_of_other_devices_are_ignored() -> None:
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
    """As in a container that runs with an unknown user id."""

    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    for name in ("ATTNPLUG_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert decode(chosen()) == ["other"]
    with raises_naming(TableError, "ATTNPLUG_CACHE_DIR"):
        table_path(BOARD)


def test_a_folder_that_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as within:
        within.setattr("os.listdir", denied)
        within.setattr("os.stat", denied)
        fault, *_ = load_tables(INSTALLED, BOARD).faults
    assert fault.endswith("tables cannot be read: Permission denied; it is not used: remove it")


def test_what_was_measured_last_comes_before_files_beside_it() -> None:
    path = table_path(BOARD)
    beside = path.with_name(f"{path.stem}.before.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in (beside, path):
        each.touch()
    assert [Path(found.path) for found in table_files((), BOARD) if found.own] == [path, beside]


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
    """D1: after it was measured, ``explain`` shows its times together with the others'."""
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
    _warned.clear()
    table_path(here).write_text("[]")
    outcome = attnplug(*arguments)
    assert outcome.code == 0 and "decode: acme" in outcome.out
    (line,) = outcome.err.splitlines()
    assert line.startswith("warning: ") and line.endswith("; it is not used: remove it")
