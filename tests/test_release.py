"""``make release``: versions, changelog, reproducible builds and smoke tests, on a small workspace of two packages."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from packaging.version import Version

from attnplug.declare.version import contract_problem

ROOT = Path(__file__).parent.parent
release = SimpleNamespace(**runpy.run_path(str(ROOT / "release.py")))

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.9.0"
dependencies = [{requires}]

[tool.hatch.build.targets.wheel]
packages = ["src/{package}"]
"""
FILES = {
    "core/pyproject.toml": PYPROJECT.format(name="attnplug", package="attnplug", requires='"torch>=0.9.0"'),
    "core/src/attnplug/__init__.py": "",
    "core/src/attnplug/declare/version.py": 'CONTRACT_VERSION = "0.9"\nOTHER = "0.9"\n',
    "engine/pyproject.toml": PYPROJECT.format(
        name="attnplug-engine", package="attnplug_engine", requires='"attnplug==0.9.0"'
    ),
    "engine/src/attnplug_engine/__init__.py": "",
    "plugins/fast/pyproject.toml": PYPROJECT.format(
        name="attnplug-fast", package="attnplug_fast", requires='"attnplug>=0.9,<0.10", "attnplug-sparse[x]>=0.9,<0.10"'
    ),
    "plugins/fast/src/attnplug_fast/__init__.py": "",
    "plugins/fast/src/attnplug_fast/plugin.py": 'spec = BackendSpec(contract="0.9", preference=0.9)\n',
    "docs/page.md": "0.9.0 is not released yet. torch 0.9.0, attnplug-fast 0.9.0, `attnplug>=0.9,<0.10`\n",
    "CHANGELOG.md": "# Changelog\n\n## 0.9.0 (unreleased)\n\n### Contract 0.9\n\n### Contract 1.0\n\nNew.\n",
}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A git repository of three packages."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")


def text(folder: Path, name: str) -> str:
    return (folder / name).read_text()


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.9.0", ">=0.9,<0.10"), ("1.0.0", ">=1.0,<2"), ("1.3.7", ">=1.3,<2"), ("1.0.0rc1", ">=1.0.0rc1,<2")],
)
def test_packages_require_the_releases_that_run_their_contract(version: str, wanted: str) -> None:
    """D4: a pre-release is below its version, so that it is named."""
    assert release.requirement_range(Version(version)) == wanted


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write an empty wheel."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("written_for", "released", "taken"),
    [
        ("1.0.0rc1", ["0.9.0", "1.0.0rc1", "2.0.0rc1"], "1.0.0rc1"),
        ("1.0.0rc1", ["1.0.0rc1", "1.0.0", "1.4.1", "2.0.0"], "1.4.1"),
        ("1.2.0", ["1.1.0", "1.2.0", "2.0.0"], "1.2.0"),
        ("1.2.0", ["0.9.0", "1.1.0", "2.0.0"], None),
        ("0.9.0", ["0.8.0", "0.9.3", "0.10.0", "1.0.0rc1", "1.0.0"], "0.9.3"),
    ],
)
@pytest.mark.sample(2)
def test_pip_resolves_what_the_gate_accepts(
    written_for: str, released: list[str], taken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: a range that names a pre-release allows it; the newest release that runs the contract is taken."""
    wheel(tmp_path, "fast", "1", f"attnplug{release.requirement_range(Version(written_for))}")
    for version in released:
        wheel(tmp_path, "attnplug", version)
    offline = ("--no-index", "--find-links", str(tmp_path), "--dry-run", "--ignore-installed", "--no-cache-dir")
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *offline, "fast"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"attnplug-(\S+)", done.stdout.partition("Would install")[2])
    assert found == ([] if taken is None else [taken]), done.stderr
    accepted = []
    for version in released:
        monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", "{}.{}".format(*Version(version).release))
        if contract_problem("{}.{}".format(*Version(written_for).release)) is None:
            accepted.append(version)
    assert (taken is None) == (accepted == []) and (taken is None or taken == max(accepted, key=Version))


def test_a_new_major_replaces_every_version_and_the_declared_contracts(workspace: Path) -> None:
    """D4: and nothing else that looks like one."""
    release.set_version(workspace, Version("0.9.0"), Version("1.0.0rc1"))
    assert text(workspace, "core/src/attnplug/declare/version.py") == 'CONTRACT_VERSION = "1.0"\nOTHER = "0.9"\n'
    assert 'version = "1.0.0rc1"' in text(workspace, "core/pyproject.toml")
    assert '"torch>=0.9.0"' in text(workspace, "core/pyproject.toml")
    assert '"attnplug==1.0.0rc1"' in text(workspace, "engine/pyproject.toml")
    assert '"attnplug>=1.0.0rc1,<2", "attnplug-sparse[x]>=1.0.0rc1,<2"' in text(
        workspace, "plugins/fast/pyproject.toml"
    )
    assert text(workspace, "plugins/fast/src/attnplug_fast/plugin.py") == FILES[
        "plugins/fast/src/attnplug_fast/plugin.py"
    ].replace('"0.9"', '"1.0"')
    assert text(workspace, "docs/page.md") == (
        "1.0.0rc1 is not released yet. torch 0.9.0, attnplug-fast 1.0.0rc1, `attnplug>=1.0.0rc1,<2`\n"
    )
    assert text(workspace, "CHANGELOG.md") == FILES["CHANGELOG.md"]


def test_a_minor_leaves_the_lowest_contract_that_a_plugin_needs(workspace: Path) -> None:
    """D4"""
    release.set_version(workspace, Version("0.9.0"), Version("1.0.0"))
    release.set_version(workspace, Version("1.0.0"), Version("1.1.0"))
    assert 'contract="1.0"' in text(workspace, "plugins/fast/src/attnplug_fast/plugin.py")
    assert '"attnplug>=1.1,<2"' in text(workspace, "plugins/fast/pyproject.toml")
    assert 'CONTRACT_VERSION = "1.1"' in text(workspace, "core/src/attnplug/declare/version.py")


@pytest.mark.parametrize(
    "version", ["1.0", "v1.0.0", "1.0.0-rc1", "01.0.0", "1.0.0.dev1", "1.0.0+local", "one", "0.8.9"]
)
def test_what_is_not_a_later_version_is_refused(version: str, workspace: Path, capsys: pytest.CaptureFixture) -> None:
    assert release.main([version, "--root", str(workspace)]) == 1
    assert version in capsys.readouterr().err
    assert text(workspace, "core/pyproject.toml") == FILES["core/pyproject.toml"]


def test_nothing_is_changed_where_a_release_cannot_be_made(workspace: Path, capsys: pytest.CaptureFixture) -> None:
    """Changes in the work tree, a tag that exists, a changelog without a section or a contract."""

    def refused(version: str, *parts: str) -> None:
        assert release.main([version, "--root", str(workspace)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and all(part in error for part in parts), error
        assert text(workspace, "core/pyproject.toml") == FILES["core/pyproject.toml"]

    refused("1.1.0", "### Contract 1.1")
    git(workspace, "tag", "v1.0.0")
    refused("1.0.0", "v1.0.0")
    (workspace / "new.md").write_text("new")
    refused("1.0.1", "new.md")
    commit(workspace)
    (workspace / "CHANGELOG.md").write_text("# Changelog\n\n## 0.8.0 (2026-01-01)\n")
    commit(workspace)
    refused("1.0.1", "(unreleased)")


def test_packages_are_built_twice_with_equal_hashes(workspace: Path) -> None:
    """A second run on another day gives the same hashes."""
    dated, epoch = release.changelog(workspace, Version("0.9.0"), "2026-11-18")
    assert "## 0.9.0 (2026-11-18)\n" in dated and epoch == 1794960000
    first = release.build(workspace, workspace / "dist", epoch)
    assert len(first) == 6 and len(list((workspace / "dist").iterdir())) == 7
    (workspace / "CHANGELOG.md").write_text(dated)
    again, same = release.changelog(workspace, Version("0.9.0"), "2027-01-01")
    assert (again, same) == (dated, epoch)
    (path,) = (workspace / "dist").glob("attnplug_fast-0.9.0-*.whl")
    with ZipFile(path) as wheel:
        assert {info.date_time[:3] for info in wheel.infolist()} == {(2026, 11, 18)}


def test_a_build_that_depends_on_its_folder_is_an_error(workspace: Path) -> None:
    hook = "[tool.hatch.build.hooks.custom]\n"
    path = workspace / "plugins" / "fast" / "pyproject.toml"
    path.write_text(path.read_text() + hook)
    (path.parent / "hatch_build.py").write_text(
        "from pathlib import Path\n"
        "from hatchling.builders.hooks.plugin.interface import BuildHookInterface\n"
        "class Custom(BuildHookInterface):\n"
        "    def initialize(self, version, build_data):\n"
        "        Path(self.root, 'src/attnplug_fast/where.py').write_text(repr(self.root))\n"
    )
    commit(workspace)
    with pytest.raises(release.ReleaseError, match="attnplug_fast"):
        release.build(workspace, workspace / "dist", 1794960000)


def test_a_package_is_installed_with_those_of_ours_that_it_requires(workspace: Path) -> None:
    folders = release.packages(workspace)
    assert release.required("attnplug-engine", folders) == {"attnplug", "attnplug-engine"}
    assert release.required("attnplug", folders) == {"attnplug"}


def test_all_packages_of_this_workspace_are_released() -> None:
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("PACKAGES :="))
    folders = {path.relative_to(ROOT).as_posix() for path in release.packages(ROOT).values()}
    assert folders == set(line.removeprefix("PACKAGES :=").split())
