"""Wheels of small plugins and of a small host, built against earlier versions of the contract, still run (E4)."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

import fossil_run
import later_contract
from attnplug.declare.version import contract_problem
from later_contract import parts

ROOT = Path(__file__).parent.parent
FOSSILS = {path.parent.name: path.parent for path in sorted(ROOT.glob("fossils/*/SHA256SUMS"))}
RUN = [contract for contract in FOSSILS if contract_problem(contract) is None]
TOLERANCE = 1e-4


def unpack(contract: str, folder: Path, pretended: str | None = None) -> Path:
    """Unpack the wheels of a contract into a folder for ``sys.path``. They declare ``pretended`` if it is given."""
    for wheel in FOSSILS[contract].glob("*.whl"):
        with ZipFile(wheel) as archive:
            archive.extractall(folder)
    if pretended is not None:
        for plugin in folder.glob("*/plugin.py"):
            text = plugin.read_text()
            assert text.count(f'contract="{contract}"') == 1
            plugin.write_text(text.replace(f'contract="{contract}"', f'contract="{pretended}"'))
    return folder


def run(folder: Path, every: int, *names: str, path: str = "", device: str = "cpu") -> dict[str, Any]:
    """Run the fossils in a new process: their modules and metadata are gone afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    plugins = ",".join(name.replace("_", "-") for name in fossil_run.PLUGINS)
    paths = filter(None, (path, os.environ.get("PYTHONPATH")))
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "ATTNPLUG_PLUGINS": plugins}
    command = [sys.executable, fossil_run.__file__, str(folder), str(every), device, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_alive(result: dict[str, Any]) -> None:
    assert result["selectable"] == sorted(fossil_run.PLUGINS)
    assert result["broken"] == {}
    steps = {f"{name}: {step}": error for name, run in result["served"].items() for step, error in run.items()}
    assert {step.partition(": ")[2] for step in steps} >= {"prefill with prefix", "decode", "capture", "replay"}
    assert {step: error for step, error in steps.items() if not error < TOLERANCE} == {}
    assert {name: kit["failed"] for name, kit in result["conforming"].items() if kit["failed"]} == {}
    assert all(kit["passed"] for kit in result["conforming"].values())


def test_there_are_fossils_of_the_current_contract() -> None:
    """E4: of its major, from 1.0 on."""
    assert RUN


@pytest.mark.parametrize("contract", RUN)
def test_fossils_are_selected_conform_and_run(contract: str, tmp_path: Path) -> None:
    """E4"""
    assert_alive(run(unpack(contract, tmp_path), 7))


def test_fossils_of_another_major_are_refused_with_the_command_that_fixes_it(tmp_path: Path) -> None:
    """E4, D4: one message per plugin, which names both ways out."""
    result = run(unpack("0.9", tmp_path), 7)
    assert result["selectable"] == [] and result["broken"].keys() == set(fossil_run.PLUGINS)
    for name, error in result["broken"].items():
        package = name.replace("_", "-")
        assert "it needs contract 0.9; this attnplug has contract" in error and error.count("\n") == 0
        assert f"install a release of {package} for contract 1." in error
        assert "or run: pip install 'attnplug>=0.9,<0.10'" in error


@pytest.mark.long
def test_fossils_of_0_9_run_once_they_declare_1_0(tmp_path: Path) -> None:
    """E4: as the changelog's porting table says. Nothing but the declared version changes."""
    assert_alive(run(unpack("0.9", tmp_path, "1.0"), 7))


@pytest.mark.long
@pytest.mark.parametrize("contract", RUN)
def test_fossils_pass_all_quick_checks(contract: str, tmp_path: Path) -> None:
    """E4"""
    assert_alive(run(unpack(contract, tmp_path), 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("contract", RUN)
def test_fossils_conform_on_a_gpu(contract: str, tmp_path: Path) -> None:
    """E4: with captured graphs."""
    assert_alive(run(unpack(contract, tmp_path), 1, device="cuda"))


@pytest.fixture(scope="module", params=[pytest.param("1.1", marks=pytest.mark.long), "1.3"])
def minor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The oldest fossils that run, on a later minor of core."""
    core, folder = tmp_path_factory.mktemp("core"), tmp_path_factory.mktemp("fossils")
    later_contract.write(ROOT / "core" / "src", core, request.param)
    names = [name for each, name in later_contract.MINORS.items() if parts(each) <= parts(request.param)]
    return {"version": request.param, **run(unpack(RUN[0], folder), 9, *names, path=str(core))}


@pytest.fixture
def additions(minor: dict[str, Any]) -> list[dict[str, Any]]:
    """Results of each kind of addition, by minor."""
    return list(minor["later"].values())


def test_fossils_run_on_minors_that_add_one_of_each(minor: dict[str, Any], additions: list[dict[str, Any]]) -> None:
    """E4, A9: a hook, an extra, fields with defaults, a feature, a level and a format; 1.3 has those of 1.1, too."""
    assert len(additions) == {"1.1": 1, "1.3": 2}[minor["version"]]
    for each in additions:
        declared, core = parts(each["declared"]), parts(minor["version"])
        assert declared[0] == core[0] and declared < core, "an older minor of the same major"
    assert_alive(minor)


def test_fields_of_a_later_minor_have_their_defaults(additions: list[dict[str, Any]]) -> None:
    """E4"""
    assert all(each["field"] == [None, True, 0] for each in additions)


@pytest.mark.parametrize(("kind", "code"), [("level", "cuda_graph"), ("format", "kv_dtype")])
def test_a_fossil_is_refused_where_a_later_minor_asks_for_more(
    kind: str, code: str, additions: list[dict[str, Any]]
) -> None:
    """E4, D3: what a backend does not claim, it does not serve."""
    assert all(each[kind] == [code] for each in additions)


def test_a_fossil_does_not_serve_a_later_feature(additions: list[dict[str, Any]]) -> None:
    """E4, D3"""
    for each in additions:
        claimed, with_feature, without = each["feature"]
        assert (claimed, with_feature, without) == (False, ["feature"], [])


def test_a_fossil_never_drops_a_later_extra(minor: dict[str, Any]) -> None:
    """E4, A9"""
    for name, each in minor["later"].items():
        error = each["extra"]
        assert name in error and error.partition(":")[0].endswith("Error") and "TypeError" not in error


def test_a_fossil_wrapper_forwards_a_later_hook_and_combines_a_later_claim(additions: list[dict[str, Any]]) -> None:
    """E4, A9: with the protocol's defaults, to the child of its route."""
    for each in additions:
        assert each["hook"] == ["noted", True, True]
        assert each["claim"] == [3, ["prefill"]]


@pytest.mark.parametrize("contract", FOSSILS)
def test_fossils_are_the_files_that_were_built(contract: str) -> None:
    """E4: a released fossil never changes."""
    folder = FOSSILS[contract]
    sums = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.whl")}
    assert len(sums) == 5


def test_wheels_hold_their_sources() -> None:
    """E4: those of the newest contract; sources follow the contract, older wheels keep their own."""
    newest = max(FOSSILS, key=lambda contract: tuple(map(int, contract.split("."))))
    packed: dict[str, bytes] = {}
    for wheel in FOSSILS[newest].glob("*.whl"):
        with ZipFile(wheel) as archive:
            packed |= {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    sources = ROOT / "fossils" / "sources"
    written = {
        str(path.relative_to(project / "src")): path.read_bytes()
        for project in sources.iterdir()
        for path in project.glob("src/**/*.py")
    }
    assert packed == written, "run python fossils/build.py CONTRACT"


def test_a_wheel_is_built_byte_by_byte_the_same(tmp_path: Path) -> None:
    """E4: whatever the file modes and times of a checkout are."""
    project = tmp_path / "sources" / "fossil-linear"
    shutil.copytree(ROOT / "fossils" / "sources" / project.name, project, copy_function=shutil.copyfile)
    (project / "pyproject.toml").chmod(0o600)
    build = runpy.run_path(str(ROOT / "fossils" / "build.py"))["build"]
    (wheel,) = build(tmp_path / "built", project.parent)
    newest = FOSSILS[max(FOSSILS, key=lambda contract: tuple(map(int, contract.split("."))))]
    assert wheel.read_bytes() == (newest / wheel.name).read_bytes(), f"hatchling is {version('hatchling')}"
