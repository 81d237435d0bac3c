"""Each package's tests run on their own: shared code is in attnplug-testing, not in another package's folder."""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from import_statements import imports_of

ROOT = Path(__file__).parent.parent
FOLDERS = [
    ROOT / "tests",
    *(path for pattern in ("[!.]*", "[!.]*/*") for path in sorted(ROOT.glob(f"{pattern}/tests"))),
]


def project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


@cache
def modules(folder: Path) -> set[str]:
    """The names that files in a folder can be imported by, once the folder is on the path."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}


def imported(path: Path) -> set[str]:
    """Return the top-level names of the modules that a file imports."""
    return {name.partition(".")[0] for name in imports_of(path)}


def name(folder: Path) -> str:
    return folder.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_no_test_imports_from_another_packages_tests(folder):
    elsewhere = set().union(*(modules(other) for other in FOLDERS if other != folder)) - sys.stdlib_module_names
    for path in folder.rglob("*.py"):
        assert not elsewhere & imported(path) - modules(folder) - modules(path.parent), path


OF_THIRD_PARTIES = {"hypothesis", "packaging", "pytest", "transformers", "triton"}
PACKAGE_OF = {
    path.name: project(path.parents[1])["name"]
    for pattern in ("*", "*/*")
    for path in ROOT.glob(f"{pattern}/src/*")
    if path.is_dir() and (path.parents[1] / "pyproject.toml").exists()
}


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=name)
def test_what_tests_import_is_declared(folder):
    """``cd PACKAGE && pytest`` runs in an environment with the package's extra ``test``."""
    itself = project(folder.parent)
    declared = {Requirement(text).name for text in (*itself["dependencies"], *itself["optional-dependencies"]["test"])}
    if "attnplug-testing" in declared:
        declared |= {Requirement(text).name for text in project(ROOT / "testing")["dependencies"]}
    own = [path for path in folder.rglob("*.py") if "hosted" not in path.parts]  # those bring their own environment
    used = {module for path in own for module in imported(path)}
    needed = {PACKAGE_OF[module] for module in used if module in PACKAGE_OF} | (used & OF_THIRD_PARTIES)
    assert needed <= declared | {itself["name"]}
